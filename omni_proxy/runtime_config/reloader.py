"""Config reload: watches FILE, and calls `ConfigStore.reload` after an edit or a SIGHUP.

Invariant: the file is read only once it has been unchanged for `SETTLE_SECS`, so an editor that
truncates it first never empties the fleet. The folder is watched, because a watch on the file ends
with its first rename. A change is detected by the file's signature, following links, so a
Kubernetes `..data` swap is noticed. If the system can't provide a watch (descriptors, inotify
instances), the file is polled at the same interval, and the watch is retried.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio
from watchfiles import awatch
from watchfiles._rust_notify import WatchfilesRustInternalError

from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.system.files import FileSignature, file_signature
from omni_proxy.system.systemd import SILENT, ServiceManager

with suppress(ImportError):  # a private module: without this, awatch imports it in the event loop
    import anyio._backends._trio  # noqa: F401

SETTLE_SECS: Final = 0.1
EMPTY_SETTLE_SECS: Final = 0.5  # an empty file is probably still being written
POLL_MILLIS: Final = 500  # for files without inotify: network file systems, targets of links
POLLS_PER_WATCH: Final = 60  # polls of the file before a failed watch is retried

_log = logging.getLogger(__name__)


class Reloader:
    """Reloads the configuration; requests that arrive before a reload begins are merged.
    `watch`: as `watchfiles.awatch`."""

    def __init__(
        self,
        config_store: ConfigStore,
        service_manager: ServiceManager = SILENT,
        watch: Callable[..., AsyncGenerator[object, None]] = awatch,
    ) -> None:
        self._awatch = watch
        self._config_store = config_store
        self._service_manager = service_manager
        self._requests_in, self._requests = trio.open_memory_channel[str](1)
        self._signature = config_store.loaded_signature  # to notice an edit during the start

    def request_reload(self, source: str) -> None:
        try:
            self._requests_in.send_nowait(source)
        except trio.WouldBlock:
            return  # the queued reload will read the newest content

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            if self._config_store.file is not None:
                nursery.start_soon(self._watch, self._config_store.file)
            task_status.started()
            while True:
                source = await self._requests.receive()
                if (file := self._config_store.file) is not None:
                    is_settled = source == "file"
                    self._signature = (
                        file_signature(file) if is_settled else await self._wait_settled(file)
                    )
                self._service_manager.reloading()
                await self._config_store.reload(source)
                self._service_manager.ready()

    async def _watch(self, file: Path) -> None:
        reported = ""
        while True:
            try:
                await self._watch_folder(file)
            except (OSError, WatchfilesRustInternalError) as error:
                if str(error) != reported:
                    reported = str(error)
                    _log.warning(
                        "config_watch_failed file=%s error=%s poll_secs=%.1f",
                        file, error, POLL_MILLIS / 1000,
                    )  # fmt: skip
            for _ in range(POLLS_PER_WATCH):
                await trio.sleep(POLL_MILLIS / 1000)
                await self._check(file)

    async def _watch_folder(self, file: Path) -> None:
        stop = trio.Event()
        try:
            async for _ in self._awatch(
                file.parent,
                recursive=False,
                watch_filter=None,
                stop_event=stop,
                debounce=50,
                step=20,
                rust_timeout=POLL_MILLIS,
                yield_on_timeout=True,
            ):
                await self._check(file)
        finally:
            stop.set()  # otherwise its thread keeps running for seconds

    async def _check(self, file: Path) -> None:
        if file_signature(file) != self._signature:
            self._signature = await self._wait_settled(file)
            self.request_reload("file")

    async def _wait_settled(self, file: Path) -> FileSignature | None:
        now = file_signature(file)
        while True:
            await trio.sleep(EMPTY_SETTLE_SECS if now and now[1] == 0 else SETTLE_SECS)
            before, now = now, file_signature(file)
            if now == before:
                return now
