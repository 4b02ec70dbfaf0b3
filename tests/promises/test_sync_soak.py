"""Sync after sync under traffic, some of them aborted: no client notices, and nothing grows."""

import pytest
import trio

from tests.promises.held import Held
from tests.promises.sync_program import PATIENCE_SECS
from tests.promises.sync_steps import failing, routable_only_by_what_they_say, sync, whole
from tests.promises.sync_traffic import Traffic

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")

FORMS = ({"form": "two-phase"}, {"form": "buckets"})
ABORTED = ("wrong-shape", "die-before", "short-bucket")
WARM_ROUNDS = 2  # what is kept for the next time is there after these
ROUNDS = 20
# By chance: connections that wait for their next request, a thread or a spare child on its way.
SLACK = {"children": 2, "threads": 4, "files": 8, "mib": 60.0, "shared_mib": 8.0}


@pytest.fixture(autouse=True)
async def soon():
    with trio.fail_after(150):
        yield


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("one", "wide", "other", drain_secs=20)


@pytest.fixture
async def seen(running, trainers):
    async with running.client() as it:
        await whole(it, trainers)
        yield it


async def test_twenty_syncs_in_a_row_pass_under_traffic_unnoticed_and_nothing_grows(seen, trainers):
    assert (await seen.told("/server_info"))["tp_size"] == 4
    traffic = Traffic(seen, clients=2)
    async with traffic.going_on():
        for number in range(WARM_ROUNDS):
            await sync(seen, trainers, **FORMS[number % 2])
    before = Held(seen.fleet.processes())
    async with traffic.going_on():
        for number in range(ROUNDS):
            await sync(seen, trainers, **FORMS[number % 2])
    assert not traffic.failures()
    assert not traffic.spanning()
    mixed = {label: texts for label, texts in traffic.texts().items() if len(texts) > 1}
    assert not mixed
    await back_to(before, seen)


async def test_syncs_that_are_aborted_in_between_leave_nothing_behind(seen, trainers):
    await aborted_ones(seen, trainers)
    before = Held(seen.fleet.processes())
    await aborted_ones(seen, trainers)
    await back_to(before, seen)


async def aborted_ones(seen, trainers):
    for fault in ABORTED:
        done = await failing(seen, trainers, fault)
        assert done.get("gone") or done["why"], (fault, done)
        await routable_only_by_what_they_say(seen, seen.fleet.seed)
    await sync(seen, trainers)
    await seen.whole()


async def back_to(before, seen):
    """What has ended is given back a little later; what leaks stays."""
    with trio.move_on_after(PATIENCE_SECS):
        while (after := Held(seen.fleet.processes())).beyond(before, SLACK):
            await trio.sleep(0.5)
    assert not after.beyond(before, SLACK), (before, after)
