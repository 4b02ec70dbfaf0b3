"""Many syncs in a row under traffic, some of them aborted: no client gets an error, no response
mixes two versions, and nothing leaks. `tools/test --thorough` does a hundred, other runs ten."""

from itertools import cycle

import pytest
import trio

from tests.example_counts import thorough
from tests.promises.process_resources import ProcessResources
from tests.promises.sync_program import PATIENCE_SECS
from tests.promises.sync_steps import (
    ManualSync,
    assert_all_hold,
    assert_routable_only_with,
    run_failing_sync,
    run_sync,
)
from tests.promises.sync_traffic import Traffic

FORMS = ({"form": "two-phase"}, {"form": "buckets"})
# Of each spell: syncs with a group of their own, more in one group, and aborted ones.
WHOLE, IN_ONE_GROUP, REFUSED = 2, 14 if thorough() else 5, 3 if thorough() else 2
# One for each spell, because it ends a receiver at every replica; others are refused. The first is
# of the spell that fills caches.
COSTLY = ("short-bucket", "die-during")
if thorough():
    COSTLY = ("die-before", "die-before", "short-bucket", "die-after", "die-during", "die-before")
# Tolerance: kept-alive connections, idle threads.
SLACK = {"children": 2, "threads": 2, "files": 2, "sockets": 8, "mib": 60.0, "shared_mib": 8.0}


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("one", "wide", "other", drain_secs=20)


@pytest.fixture
def within_secs():
    return 300


async def test_many_syncs_under_traffic_cause_no_error_and_no_leak(seen, trainers):
    syncs = len(COSTLY[1:]) * (WHOLE + IN_ONE_GROUP + REFUSED + 1)
    assert syncs == (100 if thorough() else 10) > max(SLACK["files"], SLACK["sockets"])
    assert (await seen.get_json("/server_info"))["tp_size"] == 4
    traffic = Traffic(seen, clients=2)
    async with traffic.keep_asking():
        await spell(seen, trainers, COSTLY[0], rounds=1)  # fills caches
    before = ProcessResources(seen.fleet.processes())
    async with traffic.keep_asking():
        for fault in COSTLY[1:]:
            await spell(seen, trainers, fault, rounds=IN_ONE_GROUP)
    assert not traffic.failures()
    assert not traffic.spanning()
    mixed = {label: texts for label, texts in traffic.texts().items() if len(texts) > 1}
    assert not mixed
    await back_to(before, seen)


async def spell(seen, trainers, fault, rounds):
    for each in (*["wrong-shape"] * REFUSED, fault):
        await aborted(seen, trainers, each)
    for _, options in zip(range(WHOLE), cycle(FORMS), strict=False):
        await run_sync(seen, trainers, **options)
    await in_one_group(seen, trainers, rounds)


async def in_one_group(seen, trainers, rounds):
    """As trainers that keep their group do; every second round pauses the engines too."""
    begun = await ManualSync(seen, trainers.one(), world=5).join()
    for number in range(rounds):
        begun.next()
        if number % 2:
            assert (await seen.post("/pause_generation", mode="retract"))[0] == 200
        assert (await begun.prepare())[0] == 200
        await begun.send()
        body = await begun.completed()
        assert set(body["verification"]["checked"]) == {each.url for each in seen.fleet.replicas}
        assert (await seen.post("/continue_generation"))[0] == 200
    await begun.end()
    await assert_all_hold(seen, begun.seed)


async def aborted(seen, trainers, fault):
    form = "single" if fault == "die-during" else "two-phase"
    done = await run_failing_sync(seen, trainers, fault, form=form)
    assert done.get("gone") or done["why"], (fault, done)
    await seen.post("/continue_generation")  # as the supervisor of a dead trainer does
    await assert_routable_only_with(seen, seen.fleet.seed)


async def back_to(before, seen):
    """Resources of ended tasks are freed a little later; leaks stay."""
    with trio.move_on_after(PATIENCE_SECS):
        while (after := ProcessResources(seen.fleet.processes())).beyond(before, SLACK):
            await trio.sleep(0.5)
    assert not after.beyond(before, SLACK), (before, after)
