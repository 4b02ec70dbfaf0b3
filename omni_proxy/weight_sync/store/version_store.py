"""The versions that are kept: in shared memory while they are new, on a disk for good.

    begin ─> vN.partial ─seal─> vN ─publish─> vN, with an epoch ─┬─> collected, keep_versions later
                │                │                               └─publish again (rollback)
                └──── discard ───┴─> gone

A version is received into memory where it fits there, else straight onto the disk; `persist` brings
it to the disk afterwards. Only the current one stays in memory then. Methods may be called from any
thread, and block. Invariant: what somebody leases is not removed from where the lease says it is.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from omni_proxy.weight_sync.store import filesystem, shm_cleanup
from omni_proxy.weight_sync.store.draft import PARTIAL, Draft
from omni_proxy.weight_sync.store.manifest import RECORD, Manifest, StoredVersion, encode
from omni_proxy.weight_sync.store.recovery import digests_in, found_in, set_aside

CURRENT: Final = "current"
_log = logging.getLogger(__name__)


class NoRoom(Exception):
    """The announced version fits nowhere; the text has the numbers."""


class UnknownVersion(LookupError):
    """There is no such version; the text names those that there are."""


@dataclass(slots=True)
class _Kept:
    """A whole version. `memory` and `disk`: whether it is in that folder."""

    record: Manifest
    memory: bool = False
    disk: bool = False
    pending: bool = False  # received, and whether the fleet has it is just being decided


class VersionStore:
    """Raises OSError where its folder can't be used, StoreBusy where another program uses it."""

    def __init__(self, disk: Path, *, keep: int = 2, memory: Path | None = None) -> None:
        """`memory`: a folder on a file system in memory; None where `disk` is all there is."""
        self.keep = keep
        self._disk = disk
        self._memory = memory
        self._changing = threading.RLock()
        self._leases: Counter[Path] = Counter()
        self._kept: dict[int, _Kept] = {}
        self._drafts = 0  # that are neither sealed nor thrown away
        for folder in filter(None, (disk, memory)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ranked: tuple[StoredVersion, ...] = ()  # by epoch, the newest first
        self._held: int | None = filesystem.lock(disk)
        self._claimed: int | None = None
        try:
            self._claimed = shm_cleanup.claim(memory, disk) if memory is not None else None
            self._find()
            self._tell()
            self._point()
        except OSError:
            self.close()
            raise
        self._numbered = max(self._kept, default=0)

    @property
    def folder(self) -> Path:
        return self._disk

    @property
    def roots(self) -> list[Path]:
        """Where versions are."""
        return [root for root in (self._disk, self._memory) if root is not None]

    def close(self) -> None:
        """Others may use the folder from here on; may be called again."""
        held = [each for each in (self._held, self._claimed) if each is not None]
        self._held = self._claimed = None
        for each in held:
            os.close(each)

    @property
    def in_use(self) -> bool:
        """Whether somebody reads a version, receives one, or has not decided what becomes of it."""
        undecided = self._drafts > 0 or any(kept.pending for kept in list(self._kept.values()))
        return undecided or any(self._leases.values())

    def leave(self) -> None:
        """As `close`, in good order: memory is given back for what is on the disk."""
        with self._changing:
            for number, kept in self._kept.items():
                if kept.memory and kept.disk:
                    self._remove_from_memory(number, kept)
            self._tell()
            self._point()
            try:
                # Before the next one may have it, which would find it in use and then gone.
                if self._memory is not None and not self._kept_in_memory:
                    shm_cleanup.give_up(self._memory)
            finally:
                self.close()

    def versions(self) -> list[StoredVersion]:
        """The newest first. This and the three below wait for nobody."""
        return sorted(self._ranked, key=lambda version: version.number, reverse=True)

    @property
    def current(self) -> StoredVersion | None:
        """What the fleet was last found to have."""
        return next((version for version in self._ranked if version.epoch), None)

    @property
    def previous(self) -> StoredVersion | None:
        """What the fleet had before that."""
        published = [version for version in self._ranked if version.epoch]
        return published[1] if len(published) > 1 else None

    def find(self, wanted: int | str) -> StoredVersion:
        """By number, or by label (the newest of that label). Raises UnknownVersion."""
        for version in self._ranked:
            if wanted == (version.number if isinstance(wanted, int) else version.label):
                return version
        if isinstance(wanted, str) and wanted.isdecimal():
            return self.find(int(wanted))
        known = ", ".join(version.name for version in self.versions()) or "none"
        raise UnknownVersion(f"there is no version {wanted!r} in {self._disk}; there are: {known}")

    def begin(self, nbytes: int) -> Draft:
        """A version to receive `nbytes` into. Raises NoRoom, OSError."""
        with self._changing:
            self._return_roots()
            self.collect()
            in_memory = self._choose(nbytes)
            self._numbered += 1
            folder = self._memory if in_memory and self._memory else self._disk
            place = folder / f"v{self._numbered}{PARTIAL}"
            draft = Draft(self._numbered, place, in_memory=in_memory)
            self._drafts += 1
            return draft

    def require_room(self, draft: Draft, nbytes: int) -> None:
        """For so many bytes more. Raises NoRoom."""
        free = filesystem.room_on(draft.folder)
        if nbytes > free:
            raise self._no_room(nbytes, f"{draft.folder.parent} has {free} free")

    def seal(self, draft: Draft, label: str | None = None) -> StoredVersion:
        """Everything has come: from here on it is a version. Raises OSError."""
        draft.index()
        record = draft.record(label, complete=True)
        filesystem.put(draft.folder / RECORD, encode(record))
        with self._changing:
            self._end(draft)
            filesystem.move(draft.folder, self._folder(draft.number, memory=draft.in_memory))
            self._kept[draft.number] = _Kept(
                record, memory=draft.in_memory, disk=not draft.in_memory, pending=True
            )
            self._tell()
            return self._version(draft.number)

    def discard(self, thrown: Draft | StoredVersion) -> None:
        """A draft that failed, or a version that the fleet must not have."""
        with self._changing:
            if isinstance(thrown, Draft):
                if not thrown.over:
                    self._end(thrown)
                    filesystem.remove(thrown.folder)
            elif (kept := self._kept.get(thrown.number)) is not None:
                kept.pending = False
                self.collect()

    def publish(self, version: StoredVersion, label: str | None, epoch: int) -> StoredVersion:
        """The whole fleet has it. Raises OSError, UnknownVersion."""
        with self._changing:
            kept = self._require(version.number)
            kept.record = replace(kept.record, label=label, epoch=epoch)
            kept.pending = False
            self._write(version.number)
            self.collect()
            return self._version(version.number)

    @contextmanager
    def lease(self, version: StoredVersion) -> Iterator[StoredVersion]:
        """Its folder stays as long as this lasts. Raises UnknownVersion."""
        with self._changing:
            self._forget_lost(version.number, self._require(version.number))
            version = self._version(version.number)
            self._leases[version.folder] += 1
        try:
            yield version
        finally:
            with self._changing:
                self._leases[version.folder] -= 1
                self.collect()

    def persist(self, version: StoredVersion) -> None:
        """Bring it to the disk, where it is not yet. Raises OSError; slow."""
        with self.lease(version) as leased:
            target = self._folder(version.number, memory=False)
            if leased.on_disk:
                filesystem.settle(leased.folder)
                return
            self._return_roots()
            partial = target.with_name(target.name + PARTIAL)
            partial.mkdir(mode=0o700)
            try:
                for path in sorted(leased.folder.iterdir()):
                    if path.name != RECORD:
                        filesystem.copy(path, partial / path.name)
                with self._changing:
                    kept = self._require(version.number)
                    filesystem.put(partial / RECORD, encode(kept.record))
                    filesystem.move(partial, target)
                    kept.disk = True
                    self._tell()
                    self._point()
            finally:
                if partial.exists():
                    filesystem.remove(partial)

    def digest(self, version: StoredVersion) -> bool:
        """Hash what lies there: fill in digests that are not known, else compare; slow.

        False: its bytes have changed since. It is set aside then, and no version any more.
        """
        with self.lease(version) as leased:
            found = digests_in(leased.folder, leased.record.tensors)
        with self._changing:
            kept = self._require(version.number)
            rows = kept.record.tensors
            wrong = [name for name, row in rows.items() if row.sha256 not in ("", found[name])]
            if not wrong:
                told = {name: replace(row, sha256=found[name]) for name, row in rows.items()}
                kept.record = replace(kept.record, tensors=told)
                self._write(version.number)
                return True
            del self._kept[version.number]
            for memory in (True, False):
                if (memory and kept.memory) or (not memory and kept.disk):
                    set_aside(self._folder(version.number, memory=memory), f"{wrong[0]!r} differs")
            self._tell()
            self._point()
            return False

    def collect(self) -> list[int]:
        """Remove what nobody needs any more; the numbers of the versions that are gone."""
        with self._changing:
            ranked = self._published()
            stays = {*ranked[: self.keep], *(n for n, kept in self._kept.items() if kept.pending)}
            for number, kept in list(self._kept.items()):
                if number not in stays:
                    self._remove(number, kept)
                elif kept.memory and kept.disk and ranked[:1] != [number] and not kept.pending:
                    self._remove_from_memory(number, kept)
            gone = [number for number, kept in self._kept.items() if not (kept.memory or kept.disk)]
            for number in gone:
                del self._kept[number]
            self._tell()
            if gone:
                self._point()
            return gone

    def _remove(self, number: int, kept: _Kept) -> None:
        """From both places, unless it is being read at either."""
        folders = [self._folder(number, memory=True), self._folder(number, memory=False)]
        if any(self._leases[folder] for folder in folders):
            return
        self._remove_from_memory(number, kept)
        if kept.disk:
            filesystem.remove(folders[1])
            kept.disk = False

    def _remove_from_memory(self, number: int, kept: _Kept) -> None:
        folder = self._folder(number, memory=True)
        if kept.memory and not self._leases[folder]:
            filesystem.remove(folder)
            kept.memory = False

    def _forget_lost(self, number: int, kept: _Kept) -> None:
        """Where somebody else has removed it, it is no more. Raises UnknownVersion."""
        kept.memory = kept.memory and (self._folder(number, memory=True) / RECORD).is_file()
        kept.disk = kept.disk and (self._folder(number, memory=False) / RECORD).is_file()
        if not (kept.memory or kept.disk):
            _log.error("version %d was removed from %s by somebody else", number, self._disk)
            del self._kept[number]
        self._tell()
        self._require(number)

    @property
    def _kept_in_memory(self) -> bool:
        return self._drafts > 0 or any(kept.memory for kept in self._kept.values())

    def _end(self, draft: Draft) -> None:
        draft.over = True
        self._drafts -= 1

    def _find(self) -> None:
        for memory, root in ((False, self._disk), (True, self._memory)):
            for number, record in found_in(root).items() if root is not None else ():
                kept = self._kept.setdefault(number, _Kept(record))
                if record.epoch > kept.record.epoch:
                    kept.record = record
                kept.memory, kept.disk = kept.memory or memory, kept.disk or not memory

    def _published(self) -> list[int]:
        """By epoch, the newest first."""
        epochs = {number: kept.record.epoch for number, kept in self._kept.items()}
        return sorted((n for n in epochs if epochs[n]), key=lambda n: epochs[n], reverse=True)

    def _choose(self, nbytes: int) -> bool:
        """Whether it is received into memory. Raises NoRoom."""
        on_disk = filesystem.room_on(self._disk)
        if nbytes > on_disk:
            raise self._no_room(nbytes, f"{self._disk} has {on_disk} free")
        if self._memory is None:
            return False
        in_memory = filesystem.room_on(self._memory)
        if nbytes > in_memory:
            _log.warning(
                "the next version needs %d bytes, and %s has %d free: it is received onto the disk",
                nbytes, self._memory, in_memory,
            )  # fmt: skip
        return nbytes <= in_memory

    def _no_room(self, nbytes: int, told: str) -> NoRoom:
        return NoRoom(
            f"the announced version needs {nbytes} bytes and {told}: make room there, or set "
            f"weight_sync.store_dir to a larger place, or keep_versions to less than {self.keep}"
        )

    def _require(self, number: int) -> _Kept:
        kept = self._kept.get(number)
        if kept is None:
            raise UnknownVersion(f"version {number} is not kept any more")
        return kept

    def _folder(self, number: int, *, memory: bool) -> Path:
        root = self._memory if memory and self._memory is not None else self._disk
        return root / f"v{number}"

    def _version(self, number: int) -> StoredVersion:
        kept = self._kept[number]
        folder = self._folder(number, memory=kept.memory)
        return StoredVersion(kept.record, folder, in_memory=kept.memory, on_disk=kept.disk)

    def _write(self, number: int) -> None:
        kept = self._kept[number]
        for memory in (False, True):
            if kept.memory if memory else kept.disk:
                filesystem.put(self._folder(number, memory=memory) / RECORD, encode(kept.record))
        self._tell()
        self._point()

    def _return_roots(self) -> None:
        """Somebody may have tidied them away. Raises OSError."""
        for root in self.roots:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _tell(self) -> None:
        """Others read what stands here, without a lock: whoever changes things may take long."""
        by_rank = sorted(self._kept, key=lambda n: (self._kept[n].record.epoch, n), reverse=True)
        self._ranked = tuple(map(self._version, by_rank))

    def _point(self) -> None:
        current, link = self.current, self._disk / CURRENT
        if current is None:
            link.unlink(missing_ok=True)
        else:
            self._return_roots()
            filesystem.point(link, current.folder)
