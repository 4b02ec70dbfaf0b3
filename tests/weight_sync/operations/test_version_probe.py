import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.fleet.registry import Fleet
from omni_proxy.weight_sync.operations import version_probe
from omni_proxy.weight_sync.operations.journal_file import JournalFile
from omni_proxy.weight_sync.operations.state_journal import StateJournal
from omni_proxy.weight_sync.operations.version_probe import ASKED_AT_ONCE, VersionProbe
from tests.fleet.entries import NOW, entry, heal

MANY = 3 * ASKED_AT_ONCE


async def test_of_many_workers_that_come_up_so_many_are_asked_at_once_and_all_in_the_end(
    tmp_path, monkeypatch, nursery
):
    gate, asked = trio.Event(), []

    async def labels_of(workers, headers):
        asked.extend(workers)
        await gate.wait()
        return dict.fromkeys(workers, "v1")

    monkeypatch.setattr(version_probe, "labels_of", labels_of)
    fleet = Fleet()
    book = StateJournal(fleet, JournalFile(tmp_path))
    made = VersionProbe(fleet, book, lambda _: False, lambda: False)
    made.nursery = nursery
    fleet.apply([entry(f"w{number}") for number in range(MANY)], NOW)
    for worker in fleet.workers:
        heal(fleet, worker)
    await wait_all_tasks_blocked()
    assert len(asked) == ASKED_AT_ONCE
    gate.set()
    await wait_all_tasks_blocked()
    assert set(asked) == set(fleet.workers)
    assert {worker.weight_version for worker in fleet.workers} == {"v1"}
