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

    async def read_labels(workers, headers):
        asked.extend(workers)
        await gate.wait()
        return dict.fromkeys(workers, "v1")

    monkeypatch.setattr(version_probe, "read_labels", read_labels)
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
