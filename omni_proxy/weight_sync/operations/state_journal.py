"""Who is uncertain or paused, which version is the newest, what is under way: kept, and held to.

Invariant: a worker that is uncertain or paused is held out of routing from the moment it is in the
fleet, also when it was deleted and added again, also after a restart. Memory leads: a disk that
fails is told, and stops only what has not been begun.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import trio

from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.operations.journal_file import JournalFile
from omni_proxy.weight_sync.protocol.journal import (
    Journal,
    JournalEntry,
    PauseRecord,
    UnreadableJournal,
)
from omni_proxy.weight_sync.protocol.published_version import (
    EVERYBODY,
    PublishedVersion,
    TargetVersion,
)

UNCERTAIN: Final = "uncertain"
UPDATING: Final = "updating"
PAUSED: Final = "paused"
_log = logging.getLogger(__name__)


class StateJournal:
    """`reasons`: worker URL to why its weights are not known; read at once when it is made."""

    def __init__(self, fleet: Fleet, file: JournalFile) -> None:
        self._fleet = fleet
        self._file = file
        self._everybody = ""  # why all are uncertain that the start finds
        self._begun: JournalEntry | None = None
        self._sync: JournalEntry | None = None
        self.left_in_group: tuple[str, ...] = ()  # by a sync that our last end cut short
        self.left_group = ""
        self._writing = trio.Lock()
        self.reasons: dict[str, str] = {}
        self.paused: set[str] = set()
        self.stopped: set[str] = set()  # whose engines stand still, whether held for it or not
        self._stale = trio.Event()  # the file says that an engine stands still which does not
        self._pauses: dict[str, PauseRecord] = {}  # what is known of why, of these and of `paused`
        self.readable = True
        self.error = ""
        self.published = file.read_published()
        try:
            journal = file.read()
            self.reasons, self.paused = journal.at_start(), set(journal.paused)
            self.stopped, self._pauses = set(journal.pauses), dict(journal.pauses)
            if journal.sync is not None:
                self.left_in_group, self.left_group = journal.sync.targets, journal.sync.operation
        except UnreadableJournal as error:
            self.readable = False
            self._everybody = f"the journal {file.path} can't be read: {error}"
        for url, reason in self.reasons.items():
            _log.warning("Worker %s stays out of routing: %s", url, reason)
        for url in self.standing_still:
            _log.warning("Worker %s was paused, and stays so until it continues", url)
        fleet.watch_members(self._hold_to_it)
        fleet.watch_worker(self._hold_one)
        fleet.watch_cache_cleared(self._follow_restart)
        fleet.watch_health(self._follow_process)

    @property
    def where(self) -> str:
        return str(self._file.path)

    @property
    def in_group(self) -> bool:
        """Whether a trainer has a group with them."""
        return self._sync is not None

    @property
    def standing_still(self) -> frozenset[str]:
        """Whose engines somebody has paused, whatever [routing] makes of that: nobody else may
        have them go on."""
        return frozenset(self.paused | self.stopped)

    def pauses(self) -> dict[str, PauseRecord]:
        """By URL, of the workers in the fleet whose engines stand still; in the fleet's order."""
        still = self.standing_still
        urls = [worker.url for worker in self._fleet.workers if worker.url in still]
        return {url: self._pauses.get(url, PauseRecord()) for url in urls}

    def stand_still(self, url: str, pause: PauseRecord) -> None:
        """Its engine took a pause; the first one counts until it goes on."""
        if url not in self.standing_still:
            self._pauses.pop(url, None)
        self.stopped.add(url)
        self._pauses.setdefault(url, pause)

    def run_again(self, urls: Iterable[str]) -> bool:
        """Their engines generate; whether one of them was known to stand still."""
        were = self.stopped & set(urls)
        self.stopped -= were
        return bool(were)

    async def settle_start(self) -> None:
        """Everybody who was to be found has been: from here on the record names them."""
        if self._everybody:
            self._everybody = ""
            _log.error("the journal can't be read: every worker stays out until it is resolved")
            try:
                await trio.to_thread.run_sync(self._file.set_aside)
            except OSError as error:
                self.note(error)
        if self._begun is not None or self._sync is not None:
            # Our own task failed in the middle of it: as if the program had ended.
            self.mark(Journal(begun=self._begun, sync=self._sync).at_start())
            self._sync = None
        for worker in self._fleet.workers:
            if UPDATING in worker.cordon_reasons:
                self._fleet.uncordon(worker, UPDATING)
        await self.settle()

    async def begin(self, begun: JournalEntry) -> None:
        """Raises OSError: then nothing may be sent."""
        async with self._writing:
            await self._write(begun)
            self._begun = begun

    async def begin_sync(self, begun: JournalEntry) -> None:
        """Beside what else is under way. Raises OSError: then nothing may be sent."""
        async with self._writing:
            before, self._sync = self._sync, begun
            try:
                await self._write(self._begun)
            except OSError:
                self._sync = before
                raise

    async def settle_sync(self) -> None:
        """Every member's fate is settled, and no group is left."""
        async with self._writing:
            self._sync = None
            await self._try_to_write()

    async def settle(self) -> None:
        """Write down how things stand with nothing under way."""
        async with self._writing:
            self._begun = None
            await self._try_to_write()

    async def keep(self) -> None:
        """Write down how things stand, also while something is under way."""
        async with self._writing:
            await self._try_to_write()

    async def follow_restarts(self) -> None:
        """Write down that engines run which were started anew, until it is cancelled."""
        while True:
            await self._stale.wait()
            self._stale = trio.Event()
            await self.keep()

    async def publish(self, due: TargetVersion, urls: Iterable[str] | None) -> PublishedVersion:
        """The next epoch; it never goes back. `urls` are whom it was meant for, None for all."""
        known = {EVERYBODY, *(worker.url for worker in self._fleet.workers)}
        rows = {url: row for url, row in self.published.due.items() if url in known}
        self.published = PublishedVersion(self.published.epoch, None, rows).after(due, urls)
        await self._write_published()
        return self.published

    async def vouch(self, urls: Iterable[str]) -> None:
        """Somebody says that their weights are right, whatever they missed."""
        found = [worker for url in urls if (worker := self._fleet.find(url)) is not None]
        self.published = self.published.waive({worker.url: worker.model for worker in found})
        if self.published.due:
            await self._write_published()

    def pause(self, url: str) -> None:
        self.paused.add(url)
        self._hold_to_it()

    def go_on(self, url: str) -> None:
        self.paused.discard(url)
        worker = self._fleet.find(url)
        if worker is not None and PAUSED in worker.cordon_reasons:
            self._fleet.uncordon(worker, PAUSED)

    def mark(self, reasons: dict[str, str]) -> None:
        for url, reason in reasons.items():
            _log.warning("Worker %s is uncertain: %s", url, reason)
        self.reasons.update(reasons)
        self._hold_to_it()

    def clear(self, urls: Iterable[str]) -> None:
        for url in urls:
            if self.reasons.pop(url, None) is not None:
                worker = self._fleet.find(url)
                if worker is not None:
                    self._fleet.uncordon(worker, UNCERTAIN)

    async def _try_to_write(self) -> None:
        try:
            await self._write(self._begun)
            self.error = ""
        except OSError as error:
            self.note(error)

    async def _write(self, begun: JournalEntry | None) -> None:
        still = {url: self._pauses.get(url, PauseRecord()) for url in sorted(self.standing_still)}
        journal = Journal(
            begun=begun,
            sync=self._sync,
            uncertain=dict(self.reasons),
            paused=tuple(sorted(self.paused)),
            pauses=still,
        )
        await trio.to_thread.run_sync(self._file.write, journal)

    async def _write_published(self) -> None:
        try:
            await trio.to_thread.run_sync(self._file.write_published, self.published)
        except OSError as error:
            self.note(error)

    def _follow_restart(self, worker: Worker) -> None:
        """One that has begun anew runs; a flush does not tell that."""
        if worker.weight_version is None:
            self._runs(worker.url)

    def _follow_process(self, worker: Worker, before: Health) -> None:
        """The one that was paused may have ended while this program did not run."""
        pause = self._pauses.get(worker.url)
        if pause is not None and pause.instance and worker.instance not in ("", pause.instance):
            self._runs(worker.url)

    def _runs(self, url: str) -> None:
        if url in self.stopped:
            self.stopped.discard(url)
            self._stale.set()

    def _hold_to_it(self) -> None:
        for worker in self._fleet.workers:
            self._hold_one(worker)

    def _hold_one(self, worker: Worker) -> None:
        if self._everybody:
            self.reasons.setdefault(worker.url, self._everybody)
        if worker.url in self.reasons and UNCERTAIN not in worker.cordon_reasons:
            self._fleet.cordon(worker, UNCERTAIN)
        if worker.url in self.paused and PAUSED not in worker.cordon_reasons:
            self._fleet.cordon(worker, PAUSED)

    def note(self, error: OSError) -> None:
        """A disk that fails is told of."""
        self.error = f"{self.where}: {error.strerror or error}"
        _log.error("the weight journal could not be written: %s", self.error)
