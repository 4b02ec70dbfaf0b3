"""State journal: uncertain and paused workers, the published version, operations in progress.

Here is what the proxy records and when it is written; the format is in `protocol.journal`.

Invariant: an uncertain or paused worker is cordoned from the moment it is in the fleet, also after
it was deleted and added again, and after a restart. The state in memory is authoritative: if the
disk fails, the error is reported, and only operations that have not begun are refused.

The files are in a private folder (0700, files 0600). Invariant: when `write` returns, the file and
its folder entry are on disk (fsync). An unreadable journal is set aside, never overwritten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio
from msgspec.structs import replace

from omni_proxy.config.schema import Config
from omni_proxy.fleet.cordon_reasons import PAUSED, ROLLOUT_BATCH, UNCERTAIN, UPDATING
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.shared.atomic_write import sync_folder
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.system.files import remove_stale_temporaries, write_atomically
from omni_proxy.weight_sync.protocol.journal import (
    Journal,
    JournalEntry,
    PauseRecord,
    UnreadableJournal,
    decode,
    encode,
    readable_json,
)
from omni_proxy.weight_sync.protocol.published_version import (
    ALL_WORKERS,
    PublishedVersion,
    TargetVersion,
)
from omni_proxy.weight_sync.protocol.rollout_state_machine import RolloutState


def folder_for(state_file: Path | None, config: Config, environ: Mapping[str, str]) -> Path:
    """The journal's folder: next to the state file, or in the user's state folder.

    In the user's state folder it is named after the listen address.
    """
    if state_file is not None:
        name = state_file.name.removesuffix(".toml").removesuffix(".state")
        return state_file.with_name(f"{name}.weights")
    home = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    name = f"{config.server.host}-{config.server.port}".replace("/", "_")
    return Path(home) / "omni-proxy" / name


class JournalFile:
    """The files of the journal and of the published version. Every method blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "journal.json"
        self._epoch_path = folder / "epoch.json"

    def read(self) -> Journal:
        """Read the journal; an empty one if there is no file. Raises UnreadableJournal."""
        for path in (self.path, self._epoch_path):
            remove_stale_temporaries(path)
        try:
            return decode(self.path.read_bytes())
        except FileNotFoundError:
            return Journal()
        except OSError as error:
            raise UnreadableJournal(f"{self.path}: {error.strerror}") from None

    def set_aside(self) -> None:
        """Rename an unreadable journal, so that it can be inspected later. Raises OSError."""
        self.path.replace(self.path.with_suffix(".unreadable"))

    def write(self, journal: Journal) -> None:
        """Replace the record atomically. Raises OSError; the old record is intact then."""
        if journal:
            self._write_text(self.path, encode(journal).decode())
        elif self.path.exists():
            self.path.unlink()
            sync_folder(self.folder)

    def read_published(self) -> PublishedVersion:
        try:
            return msgspec.json.decode(self._epoch_path.read_bytes(), type=PublishedVersion)
        except FileNotFoundError:
            return PublishedVersion(0, None)
        except (OSError, *MALFORMED):
            # The epoch must never decrease; the time in seconds exceeds any count of updates.
            return PublishedVersion(int(time.time()), None)

    def write_published(self, published: PublishedVersion) -> None:
        """Raises OSError."""
        self._write_text(self._epoch_path, readable_json(published).decode() + "\n")

    def _write_text(self, path: Path, text: str) -> None:
        is_new = not self.folder.exists()
        write_atomically(path, text)
        if is_new:
            sync_folder(self.folder.parent)


_log = logging.getLogger(__name__)


class StateJournal:
    """Keeps and enforces the state. The constructor reads the file.

    `uncertain`: worker URL to the reason why its weights are unknown. `cordoned_paused`: URLs
    cordoned for a pause. `paused_engines`: URLs of paused engines, cordoned or not.
    """

    def __init__(self, fleet: Fleet, file: JournalFile) -> None:
        self._fleet = fleet
        self._file = file
        self._all_uncertain = ""  # why all workers are uncertain since the start, or ""
        self._operation: JournalEntry | None = None
        self._sync: JournalEntry | None = None
        self.rollout: RolloutState | None = None  # a rollout that has not ended
        # Participants and name of a group whose sync was interrupted by the end of the proxy.
        self.leftover_participants: tuple[str, ...] = ()
        self.leftover_group = ""
        self._write_lock = trio.Lock()
        self.uncertain: dict[str, str] = {}
        self.cordoned_paused: set[str] = set()
        self.paused_engines: set[str] = set()
        self._pauses: dict[str, PauseRecord] = {}  # for `paused_engines` and `cordoned_paused`
        self._restarted = trio.Event()  # set if an engine that the file lists as paused restarted
        self.readable = True
        self.error = ""
        self.published = file.read_published()
        try:
            journal = file.read()
            self.uncertain = journal.uncertain_at_start()
            self.cordoned_paused = set(journal.paused)
            self.paused_engines, self._pauses = set(journal.pauses), dict(journal.pauses)
            self.rollout = journal.rollout
            if journal.sync is not None:
                self.leftover_participants = journal.sync.targets
                self.leftover_group = journal.sync.operation
        except UnreadableJournal as error:
            self.readable = False
            self._all_uncertain = f"the journal {file.path} can't be read: {error}"
        for url, reason in self.uncertain.items():
            _log.warning("worker_still_uncertain worker=%s reason=%s", url, reason)
        for url in self.all_paused:
            _log.warning("worker_still_paused worker=%s", url)
        fleet.watch_members(self._cordon_all)
        fleet.watch_worker(self._cordon_worker)
        fleet.watch_cache_cleared(self._on_cache_cleared)
        fleet.watch_health(self._on_health_change)

    @property
    def path(self) -> str:
        return str(self._file.path)

    @property
    def in_group(self) -> bool:
        """Whether a trainer has a group with the workers."""
        return self._sync is not None

    @property
    def all_paused(self) -> frozenset[str]:
        """URLs of engines that a caller paused: no other operation may resume them."""
        return frozenset(self.cordoned_paused | self.paused_engines)

    def pauses(self) -> dict[str, PauseRecord]:
        """Pauses of workers in the fleet by URL, in the order of the fleet."""
        paused = self.all_paused
        urls = [worker.url for worker in self._fleet.workers if worker.url in paused]
        return {url: self._pauses.get(url, PauseRecord()) for url in urls}

    def record_pause(self, url: str, pause: PauseRecord) -> None:
        """Record that the engine was paused. The first record is kept until it is resumed."""
        if url not in self.all_paused:
            self._pauses.pop(url, None)
        self.paused_engines.add(url)
        self._pauses.setdefault(url, pause)

    def forget_pauses(self, urls: Iterable[str]) -> bool:
        """Record that the engines generate again. Returns whether one was recorded as paused."""
        resumed = self.paused_engines & set(urls)
        self.paused_engines -= resumed
        return bool(resumed)

    async def finish_start(self) -> None:
        """Call when all workers are in the fleet: later ones are uncertain only by record."""
        if self._all_uncertain:
            self._all_uncertain = ""
            _log.error("weight_journal_unreadable path=%s uncertain=all", self.path)
            try:
                await trio.to_thread.run_sync(self._file.set_aside)
            except OSError as error:
                self.record_error(error)
        if (self._operation, self._sync, self.rollout) != (None, None, None):
            # The service was restarted during an operation: recover as after a restart.
            cut_short = Journal(in_progress=self._operation, sync=self._sync, rollout=self.rollout)
            self.mark_uncertain(cut_short.uncertain_at_start())
            self._sync = None
        for worker in self._fleet.workers:
            for reason in worker.cordon_reasons & {UPDATING, ROLLOUT_BATCH}:
                self._fleet.uncordon(worker, reason)
        await self.finish_operation()

    async def begin_operation(self, entry: JournalEntry) -> None:
        """Record an operation before its calls. Raises OSError: then send no call."""
        async with self._write_lock:
            await self._write(entry)
            self._operation = entry

    async def begin_sync(self, entry: JournalEntry) -> None:
        """Record a sync's step, in addition to an operation. Raises OSError: then send no call."""
        async with self._write_lock:
            before, self._sync = self._sync, entry
            try:
                await self._write(self._operation)
            except OSError:
                self._sync = before
                raise

    async def record_rollout(self, rollout: RolloutState) -> None:
        """Record a rollout before its calls. Raises OSError: then send no call."""
        async with self._write_lock:
            before, self.rollout = self.rollout, rollout
            try:
                await self._write(self._operation)
            except OSError:
                self.rollout = before
                raise

    async def save_rollout(self, rollout: RolloutState | None) -> None:
        """Write the rollout's current state; None once it has ended."""
        async with self._write_lock:
            self.rollout = rollout
            await self._try_to_write()

    async def finish_sync(self) -> None:
        """Remove the sync's record, after its group has ended and all outcomes are decided."""
        async with self._write_lock:
            self._sync = None
            await self._try_to_write()

    async def finish_operation(self) -> None:
        """Write the state without an operation in progress."""
        async with self._write_lock:
            self._operation = None
            await self._try_to_write()

    async def save(self) -> None:
        """Write the state, including the operation in progress, if there is one."""
        async with self._write_lock:
            await self._try_to_write()

    async def follow_restarts(self) -> None:
        """Write the state each time a paused engine has restarted, until cancelled."""
        while True:
            await self._restarted.wait()
            self._restarted = trio.Event()
            await self.save()

    async def publish(self, target: TargetVersion, urls: Iterable[str] | None) -> PublishedVersion:
        """Publish `target` with the next epoch. `urls`: its targets, None for all workers."""
        current_urls = {ALL_WORKERS, *(worker.url for worker in self._fleet.workers)}
        rows = {url: row for url, row in self.published.targets.items() if url in current_urls}
        self.published = replace(self.published, targets=rows).after(target, urls)
        await self._write_published()
        return self.published

    async def extend(
        self, target: TargetVersion, urls: Iterable[str], *, only: bool = False
    ) -> None:
        """Add workers that have the last published version; `only` removes all other rows."""
        self.published = self.published.extended(target, urls, only=only)
        await self._write_published()

    async def withdraw(
        self, rows: Mapping[str, TargetVersion | None], to: tuple[int, str | None] | None = None
    ) -> None:
        """See `PublishedVersion.withdrawn`."""
        self.published = self.published.withdrawn(rows, to)
        await self._write_published()

    async def add_digest(self, epoch: int, digest: str) -> None:
        """Set the digest of the published version, if it was proven after the publication."""
        if self.published.epoch == epoch:
            self.published = self.published.with_digest(digest)
            await self._write_published()

    async def waive_targets(self, urls: Iterable[str]) -> None:
        """Record that an operator confirmed the workers' weights, even if they missed updates."""
        workers = [worker for url in urls if (worker := self._fleet.find(url)) is not None]
        self.published = self.published.waive({worker.url: worker.model for worker in workers})
        if self.published.targets:
            await self._write_published()

    def cordon_paused(self, url: str) -> None:
        self.cordoned_paused.add(url)
        self._cordon_all()

    def uncordon_paused(self, url: str) -> None:
        self.cordoned_paused.discard(url)
        worker = self._fleet.find(url)
        if worker is not None and PAUSED in worker.cordon_reasons:
            self._fleet.uncordon(worker, PAUSED)

    def mark_uncertain(self, reasons: dict[str, str]) -> None:
        """Mark workers uncertain, and cordon them. `reasons`: by worker URL."""
        for url, reason in reasons.items():
            _log.warning("worker_uncertain worker=%s reason=%s", url, reason)
        self.uncertain.update(reasons)
        self._cordon_all()

    def clear_uncertain(self, urls: Iterable[str]) -> None:
        for url in urls:
            if self.uncertain.pop(url, None) is not None:
                worker = self._fleet.find(url)
                if worker is not None:
                    self._fleet.uncordon(worker, UNCERTAIN)

    def adopt(
        self,
        published: PublishedVersion,
        pauses: Mapping[str, PauseRecord],
        cordoned_paused: Iterable[str],
    ) -> None:
        """Take over the state that another proxy of the cluster published.

        `save_adopted` writes it.
        """
        self.published = published
        self.paused_engines, self._pauses = set(pauses), dict(pauses)
        cordoned = set(cordoned_paused)
        for url in self.cordoned_paused - cordoned:
            self.uncordon_paused(url)
        self.cordoned_paused |= cordoned
        self._cordon_all()

    async def save_adopted(self) -> None:
        await self._write_published()
        await self.save()

    def record_error(self, error: OSError) -> None:
        """Log a write error of the journal, and show it in the status."""
        self.error = f"{self.path}: {error.strerror or error}"
        _log.error("weight_journal_write_failed error=%s", self.error)

    async def _try_to_write(self) -> None:
        try:
            await self._write(self._operation)
            self.error = ""
        except OSError as error:
            self.record_error(error)

    async def _write(self, operation: JournalEntry | None) -> None:
        pauses = {url: self._pauses.get(url, PauseRecord()) for url in sorted(self.all_paused)}
        journal = Journal(
            in_progress=operation,
            sync=self._sync,
            rollout=self.rollout,
            uncertain=dict(self.uncertain),
            paused=tuple(sorted(self.cordoned_paused)),
            pauses=pauses,
        )
        await trio.to_thread.run_sync(self._file.write, journal)

    async def _write_published(self) -> None:
        try:
            await trio.to_thread.run_sync(self._file.write_published, self.published)
        except OSError as error:
            self.record_error(error)

    def _on_cache_cleared(self, worker: Worker) -> None:
        """Drop the pause of a restarted engine: a restart clears the version, a flush does not."""
        if worker.weight_label is None:
            self._on_engine_restarted(worker.url)

    def _on_health_change(self, worker: Worker, before: Health) -> None:
        """Drop a pause if another process runs now: it may have restarted while the proxy was
        down."""
        pause = self._pauses.get(worker.url)
        if pause is not None and pause.instance and worker.instance not in ("", pause.instance):
            self._on_engine_restarted(worker.url)

    def _on_engine_restarted(self, url: str) -> None:
        if url in self.paused_engines:
            self.paused_engines.discard(url)
            self._restarted.set()

    def _cordon_all(self) -> None:
        for worker in self._fleet.workers:
            self._cordon_worker(worker)

    def _cordon_worker(self, worker: Worker) -> None:
        if self._all_uncertain:
            self.uncertain.setdefault(worker.url, self._all_uncertain)
        if worker.url in self.uncertain and UNCERTAIN not in worker.cordon_reasons:
            self._fleet.cordon(worker, UNCERTAIN)
        if worker.url in self.cordoned_paused and PAUSED not in worker.cordon_reasons:
            self._fleet.cordon(worker, PAUSED)


@dataclass(frozen=True, slots=True)
class OperationContext:
    """Dependencies of every weight operation: the fleet, its configuration, the journal."""

    fleet: Fleet
    config_store: ConfigStore
    journal: StateJournal
