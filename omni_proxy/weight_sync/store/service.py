"""The store as the running program has it: opened where it is first wanted, tidied meanwhile.

What takes long happens in threads of its own. `run` brings new versions to the disk and hashes what
was found at the start, one after another; nothing waits for it. Invariant: no version is offered
again whose bytes were found to have changed.
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
from omni_proxy.weight_sync.store.filesystem import memory_for
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.version_store import UnknownVersion, VersionStore

T = TypeVar("T")

MODES = ("receive", "both")  # in which we hold versions
FOLDER = "versions"
LEAVE_SECS = 10.0
AGAIN_SECS = 60.0  # after a disk that failed
_log = logging.getLogger(__name__)


class StoreService:
    """`settings` are those of the moment; `beside` is where versions lie without a `store_dir`."""

    def __init__(self, settings: Callable[[], WeightSyncConfig], beside: Path) -> None:
        self._settings = settings
        self._beside = beside
        self._opening = trio.Lock()
        self._threads = trio.CapacityLimiter(8)
        self._news = trio.Event()
        self._unproven: set[int] = set()  # versions of before, that somebody may have changed
        self.store: VersionStore | None = None
        self.error = ""  # why the last one could not be opened, or brought to the disk

    @property
    def wanted(self) -> bool:
        """Whether versions are kept at all, as we are configured."""
        return self._settings().mode in MODES

    @property
    def current(self) -> StoredVersion | None:
        return self.store.current if self.store is not None else None

    @property
    def _place(self) -> Path:
        folder = self._settings().store_dir
        return Path(folder) if folder else self._beside / FOLDER

    def versions(self) -> list[StoredVersion]:
        """The newest first; none while the store is not open."""
        return self.store.versions() if self.store is not None else []

    def has_path(self, path: str) -> bool:
        """Whether that is a place of a version in the store, of one that is gone too."""
        return self.store is not None and any(
            Path(path).is_relative_to(root) for root in self.store.roots
        )

    async def open(self) -> VersionStore:
        """Raises OSError where the folder can't be used, also for being another program's."""
        async with self._opening:
            place = self._place
            if self.store is not None and self.store.folder != place and not self.store.in_use:
                moved, self.store = self.store, None
                await self._left(moved)
            if self.store is None:
                try:
                    self.store = await self.in_thread(
                        _opened, place, self._settings().keep_versions
                    )
                except OSError as error:
                    self.error = f"{place}: {error.strerror or error}"
                    raise
                self.error = ""
                self._unproven = {version.number for version in self.store.versions()}
            self.store.keep = self._settings().keep_versions
            return self.store

    async def in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """What blocks, beside the loop. It goes on to its end, also where nobody waits any more."""
        name = f"weights-store-{getattr(call, '__name__', 'call')}"
        return await trio.to_thread.run_sync(
            partial(call, *arguments),
            thread_name=name,
            limiter=self._threads,
            abandon_on_cancel=True,
        )

    @asynccontextmanager
    async def lease(self, version: StoredVersion) -> AsyncIterator[StoredVersion]:
        """As the store's. Raises UnknownVersion, OSError."""
        store = await self.open()
        lease = store.lease(version)
        # Both wait for whoever changes the store, and the end may remove what was kept for it.
        with trio.CancelScope(shield=True):
            leased = await self.in_thread(lease.__enter__)
        try:
            yield leased
        finally:
            with trio.CancelScope(shield=True):
                await self.in_thread(lease.__exit__, None, None, None)

    async def published(self, version: StoredVersion, label: str | None, epoch: int) -> None:
        """The fleet has it. A disk that fails is told of, and changes nothing of that."""
        try:
            store = await self.open()
            await self.in_thread(store.publish, version, label, epoch)
        except (OSError, UnknownVersion) as error:
            self.error = f"{version.name}: {error}"
            _log.error("%s was published, and could not be noted so: %s", version.name, error)
        self.poke()

    def poke(self) -> None:
        """There is something new to bring to the disk."""
        self._news.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until it is cancelled. What is found at the start is there once it has started."""
        await self._opened_if_wanted()
        task_status.started()
        try:
            while True:
                self._news = trio.Event()
                await self._opened_if_wanted()
                patience = AGAIN_SECS if not await self._tidied() else float("inf")
                with trio.move_on_after(patience):
                    await self._news.wait()
        finally:
            store, self.store = self.store, None
            if store is not None:
                await self._left(store)

    async def _left(self, store: VersionStore) -> None:
        with trio.move_on_after(LEAVE_SECS, shield=True):
            try:
                await self.in_thread(store.leave)
            except OSError as error:
                _log.warning("%s could not be left in good order: %s", store.folder, error)

    async def _opened_if_wanted(self) -> None:
        if self.wanted:
            try:
                await self.open()
            except OSError as error:
                _log.error("versions of weights can't be kept: %s: %s", self.error, error)

    async def _tidied(self) -> bool:
        """Whether nothing is left to be done."""
        store, whole = self.store, True
        for version in store.versions() if store is not None else ():
            assert store is not None
            try:
                if version.epoch:
                    await self.in_thread(store.persist, version)
                # Of what we received ourselves the digests are known as a rule.
                if version.number in self._unproven or not version.digests:
                    await self.in_thread(store.digest, version)
                    self._unproven.discard(version.number)
                await self.in_thread(store.collect)
                self.error = ""
            except UnknownVersion:
                pass  # a newer one has taken its place
            except OSError as error:
                self.error = f"{version.name}: {error.strerror or error}"
                _log.error("%s could not be brought to the disk: %s", version.name, error)
                whole = False
        return whole


def _opened(folder: Path, keep: int) -> VersionStore:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return VersionStore(folder, keep=keep, memory=memory_for(folder))
