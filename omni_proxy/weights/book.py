"""Who is uncertain, which version is the newest, and what is under way: kept, and held to.

Invariant: a worker that is uncertain is held out of routing from the moment it is in the fleet,
also when it was deleted and added again. Memory leads: a disk that fails is told, and stops only
what has not been begun.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import trio

from omni_proxy.control.journal import Begun, Journal, UnreadableJournal
from omni_proxy.fleet.registry import Fleet
from omni_proxy.weights.journal_file import JournalFile, Published

UNCERTAIN, UPDATING = "uncertain", "updating"
_log = logging.getLogger(__name__)


class Book:
    """`reasons`: worker URL to why its weights are not known; read at once when it is made."""

    def __init__(self, fleet: Fleet, file: JournalFile) -> None:
        self._fleet = fleet
        self._file = file
        self._everybody = ""  # why all are uncertain that the start finds
        self._begun: Begun | None = None
        self.reasons: dict[str, str] = {}
        self.readable = True
        self.error = ""
        self.published = file.read_published()
        try:
            self.reasons = file.read().at_start()
        except UnreadableJournal as error:
            self.readable = False
            self._everybody = f"the journal {file.path} can't be read: {error}"
        for url, reason in self.reasons.items():
            _log.warning("Worker %s stays out of routing: %s", url, reason)
        fleet.watch(self._hold_to_it)

    @property
    def where(self) -> str:
        return str(self._file.path)

    async def settle_start(self) -> None:
        """Everybody who was to be found has been: from here on the record names them."""
        if self._everybody:
            self._everybody = ""
            _log.error("the journal can't be read: every worker stays out until it is resolved")
            try:
                await trio.to_thread.run_sync(self._file.set_aside)
            except OSError as error:
                self._note(error)
        if self._begun is not None:
            # Our own task failed in the middle of it: as if the program had ended.
            self.mark(Journal(begun=self._begun).at_start())
        for worker in self._fleet.workers:
            if UPDATING in worker.holds:
                self._fleet.release(worker, UPDATING)
        await self.settle()

    async def begin(self, begun: Begun) -> None:
        """Raises OSError: then nothing may be sent."""
        await trio.to_thread.run_sync(self._file.write, self._journal(begun))
        self._begun = begun

    async def settle(self) -> None:
        """Write down how things stand with nothing under way."""
        self._begun = None
        try:
            await trio.to_thread.run_sync(self._file.write, self._journal(None))
            self.error = ""
        except OSError as error:
            self._note(error)

    async def publish(self, label: str | None) -> Published:
        """The next epoch; it never goes back."""
        self.published = replace(self.published, epoch=self.published.epoch + 1, label=label)
        try:
            await trio.to_thread.run_sync(self._file.write_published, self.published)
        except OSError as error:
            self._note(error)
        return self.published

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
                    self._fleet.release(worker, UNCERTAIN)

    def _journal(self, begun: Begun | None) -> Journal:
        return Journal(begun=begun, uncertain=dict(self.reasons))

    def _hold_to_it(self) -> None:
        for worker in self._fleet.workers:
            if self._everybody:
                self.reasons.setdefault(worker.url, self._everybody)
            if worker.url in self.reasons and UNCERTAIN not in worker.holds:
                self._fleet.hold(worker, UNCERTAIN)

    def _note(self, error: OSError) -> None:
        self.error = f"{self.where}: {error.strerror or error}"
        _log.error("the weight journal could not be written: %s", self.error)
