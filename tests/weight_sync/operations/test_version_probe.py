from itertools import pairwise

import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.fleet.registry import Fleet
from omni_proxy.weight_sync.operations import version_probe
from omni_proxy.weight_sync.operations.version_probe import MAX_CONCURRENT, VersionProbe
from omni_proxy.weight_sync.state_journal import JournalFile, StateJournal
from tests.fleet.entries import NOW, entry, heal

MANY = 3 * MAX_CONCURRENT


async def test_the_number_of_concurrent_probes_is_bounded(tmp_path, monkeypatch, nursery):
    gate, probed = trio.Event(), []

    async def read_label(worker):
        probed.append(worker)
        await gate.wait()
        return "v1", True

    monkeypatch.setattr(version_probe, "read_label", read_label)
    fleet = Fleet()
    journal = StateJournal(fleet, JournalFile(tmp_path))
    probe = VersionProbe(fleet, journal, lambda _: False, lambda: False)
    probe.nursery = nursery
    fleet.apply([entry(f"w{number}") for number in range(MANY)], NOW)
    for worker in fleet.workers:
        heal(fleet, worker)
    await wait_all_tasks_blocked()
    assert len(probed) == MAX_CONCURRENT
    gate.set()
    await wait_all_tasks_blocked()
    assert set(probed) == set(fleet.workers)
    assert {worker.weight_label for worker in fleet.workers} == {"v1"}


async def test_a_failed_read_is_repeated_with_backoff(
    tmp_path, monkeypatch, nursery, autojump_clock
):
    times = []

    async def read_label(worker):
        times.append(trio.current_time())
        return ("v1", True) if len(times) == 8 else (None, False)

    monkeypatch.setattr(version_probe, "read_label", read_label)
    fleet = Fleet()
    journal = StateJournal(fleet, JournalFile(tmp_path))
    probe = VersionProbe(fleet, journal, lambda _: False, lambda: False)
    probe.nursery = nursery
    fleet.apply([entry("w")], NOW)
    (worker,) = fleet.workers
    heal(fleet, worker)
    await trio.sleep(100)
    pauses = [round(later - earlier) for earlier, later in pairwise(times)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert worker.weight_label == "v1"
