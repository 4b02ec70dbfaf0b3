from itertools import pairwise

import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.fleet.registry import Fleet
from omni_proxy.weight_sync.operations import version_probe
from omni_proxy.weight_sync.operations.version_probe import MAX_CONCURRENT, VersionProbe
from omni_proxy.weight_sync.state_journal import JournalFile, StateJournal
from tests.fleet.entries import NOW, entry, heal

MANY = 3 * MAX_CONCURRENT


async def test_probes_are_bounded_in_number_and_all_workers_are_probed(
    tmp_path, monkeypatch, nursery
):
    gate, asked = trio.Event(), []

    async def read_label(worker):
        asked.append(worker)
        await gate.wait()
        return "v1", True

    monkeypatch.setattr(version_probe, "read_label", read_label)
    fleet = Fleet()
    journal = StateJournal(fleet, JournalFile(tmp_path))
    made = VersionProbe(fleet, journal, lambda _: False, lambda: False)
    made.nursery = nursery
    fleet.apply([entry(f"w{number}") for number in range(MANY)], NOW)
    for worker in fleet.workers:
        heal(fleet, worker)
    await wait_all_tasks_blocked()
    assert len(asked) == MAX_CONCURRENT
    gate.set()
    await wait_all_tasks_blocked()
    assert set(asked) == set(fleet.workers)
    assert {worker.weight_version for worker in fleet.workers} == {"v1"}


async def test_a_read_that_failed_is_repeated_further_and_further_apart(
    tmp_path, monkeypatch, nursery, autojump_clock
):
    asked = []

    async def read_label(worker):
        asked.append(trio.current_time())
        return ("v1", True) if len(asked) == 8 else (None, False)

    monkeypatch.setattr(version_probe, "read_label", read_label)
    fleet = Fleet()
    journal = StateJournal(fleet, JournalFile(tmp_path))
    made = VersionProbe(fleet, journal, lambda _: False, lambda: False)
    made.nursery = nursery
    fleet.apply([entry("w")], NOW)
    (worker,) = fleet.workers
    heal(fleet, worker)
    await trio.sleep(100)
    pauses = [round(later - earlier) for earlier, later in pairwise(asked)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert worker.weight_version == "v1"
