"""Workers that restarted, and workers under a weight update."""

import httpx
import pytest
import trio
import trio.lowlevel

from omni_proxy.fleet.health_state import Thresholds
from tests.health.prober_fixture import URL


async def running(world, nursery):
    await nursery.start(world.prober.run)


@pytest.fixture
def forgotten(world):
    reported = []
    world.fleet.watch_cache_cleared(lambda worker: reported.append(worker.url))
    return reported


async def probes_of(world, probes, nursery, *answers):
    """One probe for each of `answers`; the threshold of failures is never reached."""
    world.fleet.thresholds = Thresholds(rise=1, fall=99)
    replies = list(answers)
    probes.reply = lambda request: replies.pop(0)
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(10 * len(answers) - 5)
    assert replies == []


def says(**keys):
    return httpx.Response(200, json=keys)


@pytest.mark.parametrize("key", ["instance", "instance_id", "start_time", "started_at"])
async def test_another_process_at_the_address_has_an_empty_cache(
    world, probes, forgotten, nursery, autojump_clock, key
):
    answers = [says(**{key: 1.5}), says(**{key: 1.5}), says(**{key: 2.5}), says(**{key: 2.5})]
    await probes_of(world, probes, nursery, *answers)
    assert forgotten == [URL]


async def test_a_body_without_an_instance_reports_no_restart(
    world, probes, forgotten, nursery, autojump_clock
):
    bad = httpx.Response(500, json={"instance": "b"})
    answers = [says(instance="a"), says(), bad, httpx.Response(200, text="ok"), says(instance="a")]
    await probes_of(world, probes, nursery, *answers)
    assert forgotten == []


@pytest.mark.parametrize(
    "between",
    [httpx.ConnectError("refused"), None],
    ids=["refused in between", "another instance"],
)
async def test_the_weight_version_of_a_restarted_worker_is_dropped(
    world, probes, forgotten, nursery, autojump_clock, between
):
    if between is not None:
        between.__cause__ = ConnectionRefusedError(111, "Connection refused")

    def answer(request):
        (worker,) = world.fleet.workers
        number = len(probes)
        if number == 1:
            world.fleet.set_version(worker, "v1", 3)
            return says(instance="a")
        assert (worker.weight_version, worker.weight_epoch) == (
            ("v1", 3) if number == 2 else (None, 0)
        )
        if number == 2 and between is not None:
            raise between
        return says(instance="a" if between else "b")

    world.fleet.thresholds = Thresholds(rise=1, fall=99)
    probes.reply = answer
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(35)
    assert len(probes) >= 3
    # Reported when it was refused, and again at the next good probe.
    assert forgotten == [URL] * (2 if between else 1)


@pytest.mark.parametrize("tolerated", [True, False])
async def test_failed_probes_of_a_worker_under_an_update_are_ignored(
    world, probes, nursery, autojump_clock, tolerated
):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(2)
    world.prober.tolerates_failures = lambda it: tolerated and it is worker
    probes.reply = lambda request: httpx.Response(503)
    await trio.sleep(60)
    assert worker.health.state == ("healthy" if tolerated else "unhealthy")


async def test_a_refused_probe_counts_under_an_update_too(world, probes, nursery, autojump_clock):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(2)
    world.prober.tolerates_failures = lambda _: True

    def refuse(request):
        raise httpx.ConnectError("refused") from ConnectionRefusedError(111, "refused")

    probes.reply = refuse
    await trio.sleep(60)
    assert worker.health.state == "unhealthy"
