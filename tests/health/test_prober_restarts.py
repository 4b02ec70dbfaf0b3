"""Workers that came back as another process, or change their weights."""

import httpx
import pytest
import trio
import trio.lowlevel

from omni_proxy.fleet.health import Thresholds
from tests.health.prober_world import URL


async def running(world, nursery):
    await nursery.start(world.prober.run)


@pytest.fixture
def forgotten(world):
    heard = []
    world.fleet.watch_cache_cleared(lambda worker: heard.append(worker.url))
    return heard


async def probes_of(world, asked, nursery, *answers):
    """One probe each; the worker stays in whatever they say."""
    world.fleet.thresholds = Thresholds(rise=1, fall=99)
    left = list(answers)
    asked.reply = lambda request: left.pop(0)
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(10 * len(answers) - 5)
    assert left == []


def says(**keys):
    return httpx.Response(200, json=keys)


@pytest.mark.parametrize("key", ["instance", "instance_id", "start_time", "started_at"])
async def test_another_process_at_the_address_has_forgotten_everything(
    world, asked, forgotten, nursery, autojump_clock, key
):
    answers = [says(**{key: 1.5}), says(**{key: 1.5}), says(**{key: 2.5}), says(**{key: 2.5})]
    await probes_of(world, asked, nursery, *answers)
    assert forgotten == [URL]


async def test_a_body_without_a_sign_of_its_process_says_nothing(
    world, asked, forgotten, nursery, autojump_clock
):
    bad = httpx.Response(500, json={"instance": "b"})
    answers = [says(instance="a"), says(), bad, httpx.Response(200, text="ok"), says(instance="a")]
    await probes_of(world, asked, nursery, *answers)
    assert forgotten == []


@pytest.mark.parametrize(
    "between",
    [httpx.ConnectError("refused"), None],
    ids=["nobody listened meanwhile", "another name"],
)
async def test_what_a_restarted_worker_said_of_its_weights_is_no_longer_believed(
    world, asked, forgotten, nursery, autojump_clock, between
):
    if between is not None:
        between.__cause__ = ConnectionRefusedError(111, "Connection refused")

    def answer(request):
        (worker,) = world.fleet.workers
        number = len(asked)
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
    asked.reply = answer
    world.add(URL)
    await running(world, nursery)
    await trio.sleep(35)
    assert len(asked) >= 3
    # Told when it was gone, and again when it could be asked.
    assert forgotten == [URL] * (2 if between else 1)


@pytest.mark.parametrize("spared", [True, False])
async def test_a_worker_whose_weights_change_may_be_slow_and_busy(
    world, asked, nursery, autojump_clock, spared
):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(2)
    world.prober.tolerates_failures = lambda it: spared and it is worker
    asked.reply = lambda request: httpx.Response(503)
    await trio.sleep(60)
    assert worker.health.state == ("healthy" if spared else "unhealthy")


async def test_a_worker_whose_process_is_gone_is_spared_by_nothing(
    world, asked, nursery, autojump_clock
):
    worker = world.add(URL)
    await running(world, nursery)
    await trio.sleep(2)
    world.prober.tolerates_failures = lambda _: True

    def refuse(request):
        raise httpx.ConnectError("refused") from ConnectionRefusedError(111, "refused")

    asked.reply = refuse
    await trio.sleep(60)
    assert worker.health.state == "unhealthy"
