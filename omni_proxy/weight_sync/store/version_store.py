"""The stored versions: received into shared memory, then written to the disk.

    begin ─> vN.partial ─seal─> vN ─publish─> vN, with an epoch ─┬─> removed, keep_versions later
                │                │                               └─publish again (rollback)
                └──── discard ───┴─> removed

A version is received into memory if it fits and the folder there is locked against removal,
otherwise directly onto the disk. `persist` writes it to the disk later; after that only the current
version stays in memory. Methods may be called from
any thread, and block. Invariant: a leased version is not removed from the folder of its lease.
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

from omni_proxy.weight_sync.store import filesystem, recovery
from omni_proxy.weight_sync.store.draft import PARTIAL, Draft
from omni_proxy.weight_sync.store.manifest import MANIFEST_FILE, Manifest, StoredVersion, encode
from omni_proxy.weight_sync.store.recovery import compute_digests, recover_versions, set_aside

CURRENT: Final = "current"
_log = logging.getLogger(__name__)


class InsufficientSpace(Exception):
    """Neither memory nor disk has room for the announced version; the text has the numbers."""


class UnknownVersion(LookupError):
    """There is no such version; the text lists the existing ones."""


@dataclass(slots=True)
class _VersionState:
    """State of a complete version. `memory` and `disk`: whether it is in that folder."""

    manifest: Manifest
    memory: bool = False
    disk: bool = False
    pending: bool = False  # received, but neither published nor discarded


class VersionStore:
    """The store. Raises OSError if its folder is unusable, StoreBusy if another program uses it."""

    def __init__(self, disk: Path, *, keep: int = 2, memory: Path | None = None) -> None:
        """`memory`: a folder on tmpfs; None to use only `disk`."""
        self.keep = keep
        self._disk = disk
        self._memory = memory
        self._lock = threading.RLock()
        self._leases: Counter[Path] = Counter()
        self._states: dict[int, _VersionState] = {}
        self._open_drafts = 0  # number of drafts that are neither sealed nor discarded
        for folder in filter(None, (disk, memory)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._snapshot: tuple[StoredVersion, ...] = ()  # in the order of epochs, newest first
        self._disk_lock: int | None = filesystem.lock(disk)
        self._memory_lock: int | None = None
        try:
            self._memory_lock = recovery.claim(memory, disk) if memory is not None else None
            self._recover()
            self._update_snapshot()
            self._update_current_link()
        except OSError:
            self.close()
            raise
        self._last_number = max(self._states, default=0)

    @property
    def folder(self) -> Path:
        return self._disk

    @property
    def roots(self) -> list[Path]:
        """The folders that contain versions."""
        return [root for root in (self._disk, self._memory) if root is not None]

    def close(self) -> None:
        """Releases the locks, so that other programs may use the folders; may be called again."""
        locks = [lock for lock in (self._disk_lock, self._memory_lock) if lock is not None]
        self._disk_lock = self._memory_lock = None
        for lock in locks:
            os.close(lock)

    @property
    def in_use(self) -> bool:
        """Whether a version is leased, being received, or neither published nor discarded."""
        undecided = self._open_drafts > 0 or any(
            state.pending for state in list(self._states.values())
        )
        return undecided or any(self._leases.values())

    def leave(self) -> None:
        """Frees the memory of versions that are on the disk, then closes."""
        with self._lock:
            for number, state in self._states.items():
                if state.memory and state.disk:
                    self._remove_from_memory(number, state)
            self._update_snapshot()
            self._update_current_link()
            try:
                # Before the lock is released: the next program must not use a folder being removed.
                if self._memory is not None and not self._uses_memory:
                    recovery.remove_empty(self._memory)
            finally:
                self.close()

    def versions(self) -> list[StoredVersion]:
        """The newest first. This and the next three methods take no lock."""
        return sorted(self._snapshot, key=lambda version: version.number, reverse=True)

    @property
    def current(self) -> StoredVersion | None:
        """The version that was published last."""
        return next((version for version in self._snapshot if version.epoch), None)

    @property
    def previous(self) -> StoredVersion | None:
        """The version that was published before `current`."""
        published = [version for version in self._snapshot if version.epoch]
        return published[1] if len(published) > 1 else None

    def find(self, key: int | str) -> StoredVersion:
        """Find a version by number, or the newest one by label. Raises UnknownVersion."""
        for version in self._snapshot:
            if key == (version.number if isinstance(key, int) else version.label):
                return version
        if isinstance(key, str) and key.isdecimal():
            return self.find(int(key))
        stored = ", ".join(version.name for version in self.versions()) or "none"
        raise UnknownVersion(f"there is no version {key!r} in {self._disk}; there are: {stored}")

    def begin(self, nbytes: int) -> Draft:
        """Create a draft for `nbytes`. Raises InsufficientSpace, OSError."""
        with self._lock:
            self._create_roots()
            self.collect()
            in_memory = self._fits_in_memory(nbytes)
            self._last_number += 1
            folder = self._memory if in_memory and self._memory else self._disk
            partial = folder / f"v{self._last_number}{PARTIAL}"
            draft = Draft(self._last_number, partial, in_memory=in_memory)
            self._open_drafts += 1
            return draft

    def require_room(self, draft: Draft, nbytes: int) -> None:
        """Raises InsufficientSpace if the draft's file system has less than `nbytes` free."""
        free = filesystem.free_space(draft.folder)
        if nbytes > free:
            raise self._space_error(nbytes, f"{draft.folder.parent} has {free} free")

    def seal(self, draft: Draft, label: str | None = None) -> StoredVersion:
        """Turns a completely received draft into a version. Raises OSError."""
        draft.write_index()
        manifest = draft.manifest(label, complete=True)
        filesystem.replace_file(draft.folder / MANIFEST_FILE, encode(manifest))
        with self._lock:
            self._finish(draft)
            filesystem.move(draft.folder, self._folder_of(draft.number, memory=draft.in_memory))
            self._states[draft.number] = _VersionState(
                manifest, memory=draft.in_memory, disk=not draft.in_memory, pending=True
            )
            self._update_snapshot()
            return self._version(draft.number)

    def discard(self, target: Draft | StoredVersion) -> None:
        """Drops a draft that failed, or a version that must not be published."""
        with self._lock:
            if isinstance(target, Draft):
                if not target.finished:
                    self._finish(target)
                    filesystem.remove(target.folder)
            elif (state := self._states.get(target.number)) is not None:
                state.pending = False
                self.collect()

    def publish(self, version: StoredVersion, label: str | None, epoch: int) -> StoredVersion:
        """Records that the whole fleet serves the version. Raises OSError, UnknownVersion."""
        with self._lock:
            state = self._require_state(version.number)
            state.manifest = replace(state.manifest, label=label, epoch=epoch)
            state.pending = False
            self._write_manifest(version.number)
            self.collect()
            return self._version(version.number)

    @contextmanager
    def lease(self, version: StoredVersion) -> Iterator[StoredVersion]:
        """Keeps the version's folder inside the context. Raises UnknownVersion."""
        with self._lock:
            self._check_present(version.number, self._require_state(version.number))
            version = self._version(version.number)
            self._leases[version.folder] += 1
        try:
            yield version
        finally:
            with self._lock:
                self._leases[version.folder] -= 1
                self.collect()

    def persist(self, version: StoredVersion) -> None:
        """Writes the version to the disk if it is not there yet. Slow. Raises OSError."""
        with self.lease(version) as leased:
            target = self._folder_of(version.number, memory=False)
            if leased.on_disk:
                filesystem.sync_files(leased.folder)
                return
            with self._lock:
                self._create_roots()
            partial = target.with_name(target.name + PARTIAL)
            partial.mkdir(mode=0o700)
            try:
                for path in sorted(leased.folder.iterdir()):
                    if path.name != MANIFEST_FILE:
                        filesystem.copy(path, partial / path.name)
                with self._lock:
                    state = self._require_state(version.number)
                    filesystem.replace_file(partial / MANIFEST_FILE, encode(state.manifest))
                    filesystem.move(partial, target)
                    state.disk = True
                    self._update_snapshot()
                    self._update_current_link()
            finally:
                if partial.exists():
                    filesystem.remove(partial)

    def digest(self, version: StoredVersion) -> bool:
        """Hashes the stored bytes: records missing digests and compares recorded ones. Slow.

        Returns False if the bytes have changed; the version is then set aside and not listed.
        """
        with self.lease(version) as leased:
            digests = compute_digests(leased.folder, leased.manifest.tensors)
        with self._lock:
            state = self._require_state(version.number)
            rows = state.manifest.tensors
            changed = [name for name, row in rows.items() if row.sha256 not in ("", digests[name])]
            if not changed:
                tensors = {name: replace(row, sha256=digests[name]) for name, row in rows.items()}
                state.manifest = replace(state.manifest, tensors=tensors)
                self._write_manifest(version.number)
                return True
            del self._states[version.number]
            for memory in (True, False):
                if (memory and state.memory) or (not memory and state.disk):
                    set_aside(
                        self._folder_of(version.number, memory=memory), f"{changed[0]!r} differs"
                    )
            self._update_snapshot()
            self._update_current_link()
            return False

    def collect(self) -> list[int]:
        """Removes versions beyond `keep`; returns their numbers."""
        with self._lock:
            ranked = self._published_numbers()
            stays = {
                *ranked[: self.keep],
                *(n for n, state in self._states.items() if state.pending),
            }
            for number, state in list(self._states.items()):
                if number not in stays:
                    self._remove(number, state)
                elif state.memory and state.disk and ranked[:1] != [number] and not state.pending:
                    self._remove_from_memory(number, state)
            expired = [
                number for number, state in self._states.items() if not (state.memory or state.disk)
            ]
            for number in expired:
                del self._states[number]
            self._update_snapshot()
            if expired:
                self._update_current_link()
            return expired

    def _remove(self, number: int, state: _VersionState) -> None:
        """Remove the version from memory and disk, unless it is leased in either."""
        folders = [self._folder_of(number, memory=True), self._folder_of(number, memory=False)]
        if any(self._leases[folder] for folder in folders):
            return
        self._remove_from_memory(number, state)
        if state.disk:
            filesystem.remove(folders[1])
            state.disk = False

    def _remove_from_memory(self, number: int, state: _VersionState) -> None:
        folder = self._folder_of(number, memory=True)
        if state.memory and not self._leases[folder]:
            filesystem.remove(folder)
            state.memory = False

    def _check_present(self, number: int, state: _VersionState) -> None:
        """Drops a version whose folder was deleted by others. Raises UnknownVersion."""
        state.memory = (
            state.memory and (self._folder_of(number, memory=True) / MANIFEST_FILE).is_file()
        )
        state.disk = (
            state.disk and (self._folder_of(number, memory=False) / MANIFEST_FILE).is_file()
        )
        if not (state.memory or state.disk):
            _log.error("stored_version_missing version=%d folder=%s", number, self._disk)
            del self._states[number]
        self._update_snapshot()
        self._require_state(number)

    @property
    def _uses_memory(self) -> bool:
        return self._open_drafts > 0 or any(state.memory for state in self._states.values())

    def _finish(self, draft: Draft) -> None:
        draft.finished = True
        self._open_drafts -= 1

    def _recover(self) -> None:
        for memory, root in ((False, self._disk), (True, self._memory)):
            for number, manifest in recover_versions(root).items() if root is not None else ():
                state = self._states.setdefault(number, _VersionState(manifest))
                if manifest.epoch > state.manifest.epoch:
                    state.manifest = manifest
                state.memory, state.disk = state.memory or memory, state.disk or not memory

    def _published_numbers(self) -> list[int]:
        """Numbers of published versions in the order of epochs, newest first."""
        epochs = {number: state.manifest.epoch for number, state in self._states.items()}
        return sorted((n for n in epochs if epochs[n]), key=lambda n: epochs[n], reverse=True)

    def _fits_in_memory(self, nbytes: int) -> bool:
        """Whether `nbytes` fit into memory. Raises InsufficientSpace if the disk is too small."""
        on_disk = filesystem.free_space(self._disk)
        if nbytes > on_disk:
            raise self._space_error(nbytes, f"{self._disk} has {on_disk} free")
        if self._memory is None:
            return False
        in_memory, locked = filesystem.free_space(self._memory), self._memory_lock is not None
        fits = locked and nbytes <= in_memory
        if not fits:
            _log.warning(
                "version_received_onto_disk bytes=%d memory_folder=%s free=%d locked=%s",
                nbytes, self._memory, in_memory, locked,
            )  # fmt: skip
        return fits

    def _space_error(self, nbytes: int, free: str) -> InsufficientSpace:
        return InsufficientSpace(
            f"the announced version needs {nbytes} bytes and {free}: free some space, set "
            f"weight_sync.store_dir to a larger disk, or keep_versions to less than {self.keep}"
        )

    def _require_state(self, number: int) -> _VersionState:
        state = self._states.get(number)
        if state is None:
            raise UnknownVersion(f"version {number} is not stored any more")
        return state

    def _folder_of(self, number: int, *, memory: bool) -> Path:
        root = self._memory if memory and self._memory is not None else self._disk
        return root / f"v{number}"

    def _version(self, number: int) -> StoredVersion:
        state = self._states[number]
        folder = self._folder_of(number, memory=state.memory)
        return StoredVersion(state.manifest, folder, in_memory=state.memory, on_disk=state.disk)

    def _write_manifest(self, number: int) -> None:
        state = self._states[number]
        for memory in (False, True):
            if state.memory if memory else state.disk:
                filesystem.replace_file(
                    self._folder_of(number, memory=memory) / MANIFEST_FILE, encode(state.manifest)
                )
        self._update_snapshot()
        self._update_current_link()

    def _create_roots(self) -> None:
        """Creates the folders again if they were deleted by others, and locks the one in memory
        unless another program has its lock. Raises OSError."""
        for root in self.roots:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        memory, lock = self._memory, self._memory_lock
        if memory is None or self._disk_lock is None:  # None: the store is closed
            return
        if lock is None:  # another program had the lock for long: it was waited for once
            self._memory_lock = recovery.claim(memory, self._disk, wait=False)
        elif not filesystem.is_open_as(lock, memory):
            # Else other programs would remove it as stale while it is empty.
            self._memory_lock = recovery.claim(memory, self._disk)
            os.close(lock)

    def _update_snapshot(self) -> None:
        """Update the snapshot, which is read without the lock: a slow change may hold it for
        long."""
        by_rank = sorted(
            self._states, key=lambda n: (self._states[n].manifest.epoch, n), reverse=True
        )
        self._snapshot = tuple(map(self._version, by_rank))

    def _update_current_link(self) -> None:
        current, link = self.current, self._disk / CURRENT
        if current is None:
            link.unlink(missing_ok=True)
        else:
            self._create_roots()
            filesystem.replace_symlink(link, current.folder)
