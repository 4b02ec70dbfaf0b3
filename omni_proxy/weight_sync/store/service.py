"""The version store in the running proxy: opened at first use, maintained in the background.

Slow operations run in threads. `run` writes new versions to the disk and verifies the digests of
versions found at the start, one after another; no request waits for it. Invariant: a version that
was found to have changed bytes is not used any more.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from omni_proxy.config.schema import WeightSyncConfig
from omni_proxy.weight_sync.store.filesystem import shared_memory_folder
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.version_store import UnknownVersion, VersionStore

T = TypeVar("T")

MODES = ("receive", "both")  # in which versions are stored
FOLDER = "versions"
CLOSE_SECS = 10.0
RETRY_SECS = 60.0  # after a disk error
_log = logging.getLogger(__name__)


class StoreService:
    """Runs the store. `settings()`: the current configuration.

    `data_dir`: has the versions if no `store_dir` is configured.
    """

    def __init__(self, settings: Callable[[], WeightSyncConfig], data_dir: Path) -> None:
        self._settings = settings
        self._data_dir = data_dir
        self._opening = trio.Lock()
        self._threads = trio.CapacityLimiter(8)
        self._changed = trio.Event()
        self._unhashed: set[int] = set()  # versions of an earlier run, not yet hashed again
        self.store: VersionStore | None = None
        self.error = ""  # why the store could not be opened or a version written

    @property
    def enabled(self) -> bool:
        """Whether the configured mode stores versions."""
        return self._settings().mode in MODES

    @property
    def current(self) -> StoredVersion | None:
        return self.store.current if self.store is not None else None

    @property
    def _folder(self) -> Path:
        folder = self._settings().store_dir
        return Path(folder) if folder else self._data_dir / FOLDER

    def versions(self) -> list[StoredVersion]:
        """The newest first; empty while the store is not open."""
        return self.store.versions() if self.store is not None else []

    def has_path(self, path: str) -> bool:
        """Whether the path is in a folder of the store, even if its version was removed."""
        return self.store is not None and any(
            Path(path).is_relative_to(root) for root in self.store.roots
        )

    async def open(self) -> VersionStore:
        """Return the opened store. Raises OSError if the folder is unusable or in use."""
        async with self._opening:
            folder = self._folder
            if self.store is not None and self.store.folder != folder and not self.store.in_use:
                previous, self.store = self.store, None
                await self._shut_down(previous)
            if self.store is None:
                try:
                    self.store = await self.run_in_thread(
                        _open_store, folder, self._settings().keep_versions
                    )
                except OSError as error:
                    self.error = f"{folder}: {error.strerror or error}"
                    raise
                self.error = ""
                self._unhashed = {version.number for version in self.store.versions()}
            self.store.keep = self._settings().keep_versions
            return self.store

    async def run_in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """Runs a blocking call in a thread; it runs to completion even if the task is cancelled."""
        name = f"weights-store-{getattr(call, '__name__', 'call')}"
        return await trio.to_thread.run_sync(
            partial(call, *arguments),
            thread_name=name,
            limiter=self._threads,
            abandon_on_cancel=True,
        )

    @asynccontextmanager
    async def lease(self, version: StoredVersion) -> AsyncIterator[StoredVersion]:
        """See `VersionStore.lease`. Raises UnknownVersion, OSError."""
        store = await self.open()
        lease = store.lease(version)
        # Entry and exit block: both take the store's lock, and the exit may remove a folder.
        with trio.CancelScope(shield=True):
            leased = await self.run_in_thread(lease.__enter__)
        try:
            yield leased
        finally:
            with trio.CancelScope(shield=True):
                await self.run_in_thread(lease.__exit__, None, None, None)

    async def published(self, version: StoredVersion, label: str | None, epoch: int) -> None:
        """Records that the whole fleet serves the version; a disk error is only logged."""
        try:
            store = await self.open()
            await self.run_in_thread(store.publish, version, label, epoch)
        except (OSError, UnknownVersion) as error:
            self.error = f"{version.name}: {error}"
            _log.error("version_publish_not_recorded version=%s error=%s", version.name, str(error))
        self.wake()

    def wake(self) -> None:
        """Wakes `run` to write new versions to the disk."""
        self._changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Maintains the store until cancelled. Started means that stored versions are listed."""
        await self._open_if_enabled()
        task_status.started()
        try:
            while True:
                self._changed = trio.Event()
                await self._open_if_enabled()
                retry_secs = RETRY_SECS if not await self._maintain() else float("inf")
                with trio.move_on_after(retry_secs):
                    await self._changed.wait()
        finally:
            store, self.store = self.store, None
            if store is not None:
                await self._shut_down(store)

    async def _shut_down(self, store: VersionStore) -> None:
        with trio.move_on_after(CLOSE_SECS, shield=True):
            try:
                await self.run_in_thread(store.leave)
            except OSError as error:
                _log.warning(
                    "version_store_close_failed folder=%s error=%s", store.folder, str(error)
                )

    async def _open_if_enabled(self) -> None:
        if self.enabled:
            try:
                await self.open()
            except OSError:
                _log.error("version_store_unavailable error=%s", self.error)

    async def _maintain(self) -> bool:
        """Writes and verifies versions. Returns whether all of that succeeded."""
        store, succeeded = self.store, True
        for version in store.versions() if store is not None else ():
            assert store is not None
            try:
                if version.epoch:
                    await self.run_in_thread(store.persist, version)
                # A version received in this run usually has its digests already.
                if version.number in self._unhashed or not version.digests:
                    await self.run_in_thread(store.digest, version)
                    self._unhashed.discard(version.number)
                await self.run_in_thread(store.collect)
                self.error = ""
            except UnknownVersion:
                pass  # a newer version has replaced it
            except OSError as error:
                self.error = f"{version.name}: {error.strerror or error}"
                _log.error("version_persist_failed version=%s error=%s", version.name, str(error))
                succeeded = False
        return succeeded


def _open_store(folder: Path, keep: int) -> VersionStore:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return VersionStore(folder, keep=keep, memory=shared_memory_folder(folder))
