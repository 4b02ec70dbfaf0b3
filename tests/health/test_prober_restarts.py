"""Probes of workers that restarted, and of workers during a weight update."""

import httpx
import pytest
import trio
import trio.lowlevel

from omni_proxy.fleet.health_state import Thresholds
from tests.health.prober_fixture import URL


async def start_prober(health, nursery):
    await nursery.start(health.prober.run)


@pytest.fixture
def cleared(health):
    urls = []
    health.fleet.watch_cache_cleared(lambda worker: urls.append(worker.url))
    return urls


async def probe_each(health, probes, nursery, *responses):
    """Make one probe for each response; the threshold of failures is never reached."""
    health.fleet.thresholds = Thresholds(rise=1, fall=99)
    replies = list(responses)
    probes.reply = lambda request: replies.pop(0)
    health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(10 * len(responses) - 5)
    assert replies == []


def health_body(**keys):
    return httpx.Response(200, json=keys)


@pytest.mark.parametrize("key", ["instance", "instance_id", "start_time", "started_at"])
async def test_another_instance_at_the_address_clears_the_cache(
    health, probes, cleared, nursery, autojump_clock, key
):
    responses = [
        health_body(**{key: 1.5}),
        health_body(**{key: 1.5}),
        health_body(**{key: 2.5}),
        health_body(**{key: 2.5}),
    ]
    await probe_each(health, probes, nursery, *responses)
    assert cleared == [URL]


async def test_a_body_without_an_instance_is_not_a_restart(
    health, probes, cleared, nursery, autojump_clock
):
    bad = httpx.Response(500, json={"instance": "b"})
    responses = [
        health_body(instance="a"),
        health_body(),
        bad,
        httpx.Response(200, text="ok"),
        health_body(instance="a"),
    ]
    await probe_each(health, probes, nursery, *responses)
    assert cleared == []


@pytest.mark.parametrize(
    "error",
    [httpx.ConnectError("refused"), None],
    ids=["refused in between", "another instance"],
)
async def test_the_weight_version_of_a_restarted_worker_is_dropped(
    health, probes, cleared, nursery, autojump_clock, error
):
    if error is not None:
        error.__cause__ = ConnectionRefusedError(111, "Connection refused")

    def respond(request):
        (worker,) = health.fleet.workers
        number = len(probes)
        if number == 1:
            health.fleet.set_version(worker, "v1", 3)
            return health_body(instance="a")
        assert (worker.weight_label, worker.weight_epoch) == (
            ("v1", 3) if number == 2 else (None, 0)
        )
        if number == 2 and error is not None:
            raise error
        return health_body(instance="a" if error else "b")

    health.fleet.thresholds = Thresholds(rise=1, fall=99)
    probes.reply = respond
    health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(35)
    assert len(probes) >= 3
    # Cleared when a probe was refused, and again at the next successful one.
    assert cleared == [URL] * (2 if error else 1)


@pytest.mark.parametrize("tolerated", [True, False])
async def test_failed_probes_during_a_weight_update_are_ignored(
    health, probes, nursery, autojump_clock, tolerated
):
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(2)
    health.prober.tolerates_failures = lambda probed: tolerated and probed is worker
    probes.reply = lambda request: httpx.Response(503)
    await trio.sleep(60)
    assert worker.health.state == ("healthy" if tolerated else "unhealthy")


async def test_refused_connections_count_during_a_weight_update_too(
    health, probes, nursery, autojump_clock
):
    worker = health.add(URL)
    await start_prober(health, nursery)
    await trio.sleep(2)
    health.prober.tolerates_failures = lambda _: True

    def refuse(request):
        raise httpx.ConnectError("refused") from ConnectionRefusedError(111, "refused")

    probes.reply = refuse
    await trio.sleep(60)
    assert worker.health.state == "unhealthy"
