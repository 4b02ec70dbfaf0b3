"""Many syncs in a row under traffic, some of them aborted: no client gets an error, no response
mixes two versions, and nothing leaks. `tools/test --thorough` runs a hundred, other runs ten."""

from itertools import cycle

import pytest
import trio

from tests.example_counts import thorough
from tests.promises.support.process_resources import ProcessResources
from tests.promises.support.sync_program import PATIENCE_SECS
from tests.promises.support.sync_steps import (
    ManualSync,
    assert_all_hold,
    assert_routable_only_with,
    run_failing_sync,
    run_sync,
)
from tests.promises.support.sync_traffic import Traffic

FORMS = ({"form": "two-phase"}, {"form": "buckets"})
# In each series: syncs with separate groups, syncs in one group, and aborted syncs.
SEPARATE, IN_ONE_GROUP, CHEAP_FAULTS = 2, 14 if thorough() else 5, 3 if thorough() else 2
# One for each series, because it ends a receiver at every replica; the other faults are cheap. The
# first is for the series that fills caches.
COSTLY_FAULTS = ("short-bucket", "die-during")
if thorough():
    COSTLY_FAULTS = (
        "die-before",
        "die-before",
        "short-bucket",
        "die-after",
        "die-during",
        "die-before",
    )
# Tolerance: kept-alive connections, idle threads.
SLACK = {"children": 2, "threads": 2, "files": 2, "sockets": 8, "mib": 60.0, "shared_mib": 8.0}


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("one", "wide", "other", drain_secs=20)


@pytest.fixture
def within_secs():
    return 300


async def test_many_syncs_under_traffic_cause_no_error_and_no_leak(seen, trainers):
    syncs = len(COSTLY_FAULTS[1:]) * (SEPARATE + IN_ONE_GROUP + CHEAP_FAULTS + 1)
    assert syncs == (100 if thorough() else 10) > max(SLACK["files"], SLACK["sockets"])
    assert (await seen.get_json("/server_info"))["tp_size"] == 4
    traffic = Traffic(seen, clients=2)
    async with traffic.keep_asking():
        await run_series(seen, trainers, COSTLY_FAULTS[0], rounds=1)  # fills caches
    before = ProcessResources(seen.fleet.processes())
    async with traffic.keep_asking():
        for fault in COSTLY_FAULTS[1:]:
            await run_series(seen, trainers, fault, rounds=IN_ONE_GROUP)
    assert not traffic.failures()
    assert not traffic.spanning()
    mixed = {label: texts for label, texts in traffic.texts().items() if len(texts) > 1}
    assert not mixed
    await assert_released(before, seen)


async def run_series(seen, trainers, fault, rounds):
    for next_fault in (*["wrong-shape"] * CHEAP_FAULTS, fault):
        await run_aborted(seen, trainers, next_fault)
    for _, options in zip(range(SEPARATE), cycle(FORMS), strict=False):
        await run_sync(seen, trainers, **options)
    await run_in_one_group(seen, trainers, rounds)


async def run_in_one_group(seen, trainers, rounds):
    """Runs several rounds in one group; every second round pauses the engines too."""
    sync = await ManualSync(seen, trainers.one(), world=5).join()
    for number in range(rounds):
        sync.next()
        if number % 2:
            assert (await seen.post("/pause_generation", mode="retract"))[0] == 200
        assert (await sync.prepare())[0] == 200
        await sync.send()
        body = await sync.completed()
        assert set(body["verification"]["checked"]) == {
            replica.url for replica in seen.fleet.replicas
        }
        assert (await seen.post("/continue_generation"))[0] == 200
    await sync.end()
    await assert_all_hold(seen, sync.seed)


async def run_aborted(seen, trainers, fault):
    form = "single" if fault == "die-during" else "two-phase"
    done = await run_failing_sync(seen, trainers, fault, form=form)
    assert done.get("gone") or done["why"], (fault, done)
    await seen.post("/continue_generation")  # as the supervisor of a dead trainer does
    await assert_routable_only_with(seen, seen.fleet.seed)


async def assert_released(before, seen):
    """Waits because resources of ended tasks are freed with a delay; leaks stay."""
    with trio.move_on_after(PATIENCE_SECS):
        while (after := ProcessResources(seen.fleet.processes())).beyond(before, SLACK):
            await trio.sleep(0.5)
    assert not after.beyond(before, SLACK), (before, after)
