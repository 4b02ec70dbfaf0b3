"""The reloader: an edit of FILE, SIGHUP and POST /reload all end in `ConfigStore.reload`.

Invariant: after an edit and a SIGHUP a file is read only once it has been unchanged for
`SETTLE_SECS`, so an editor that truncates first never empties the fleet. Watched is the folder (a
watch on the file dies at the first rename), and what counts is the file's own signature through
all links, so a Kubernetes `..data` swap is seen too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import trio
from watchfiles import awatch

from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.system.files import FileSignature, file_signature

SETTLE_SECS: Final = 0.1
EMPTY_SETTLE_SECS: Final = 0.5  # an empty file is most likely one that is being written
POLL_MILLIS: Final = 500  # where inotify is blind (network file systems, a link's far end)


class Reloader:
    """`request_reload` asks for a reload from anywhere; several pokes before it begins are one."""

    def __init__(self, config_store: ConfigStore) -> None:
        self._config_store = config_store
        self._send, self._wanted = trio.open_memory_channel[str](1)
        self._seen = config_store.read_as  # an edit while the program starts is one, too

    def request_reload(self, source: str) -> None:
        try:
            self._send.send_nowait(source)
        except trio.WouldBlock:
            return  # the reload that is due anyway will read what is there now

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            if self._config_store.file is not None:
                nursery.start_soon(self._watch, self._config_store.file)
            task_status.started()
            while True:
                source = await self._wanted.receive()
                if (file := self._config_store.file) is not None:
                    settled = source == "file"
                    self._seen = file_signature(file) if settled else await self._settled(file)
                await self._config_store.reload(source)

    async def _watch(self, file: Path) -> None:
        stop = trio.Event()
        try:
            async for _ in awatch(
                file.parent,
                recursive=False,
                watch_filter=None,
                stop_event=stop,
                debounce=50,
                step=20,
                rust_timeout=POLL_MILLIS,
                yield_on_timeout=True,
            ):
                if file_signature(file) != self._seen:
                    self._seen = await self._settled(file)
                    self.request_reload("file")
        finally:
            stop.set()  # its thread is not abandoned otherwise for seconds

    async def _settled(self, file: Path) -> FileSignature | None:
        now = file_signature(file)
        while True:
            await trio.sleep(EMPTY_SETTLE_SECS if now and now[1] == 0 else SETTLE_SECS)
            before, now = now, file_signature(file)
            if now == before:
                return now
