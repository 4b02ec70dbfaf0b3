"""A best-effort sink of whole lines, such as the access log and the route log.

Invariant: `write` neither waits nor raises. Lines that can't be written in time are dropped and
counted; if a file can't be opened, lines are lost, but no request fails. After a partial write, as
on a full disk, the next write begins a new line. The file is opened for each flush and its folder
created if it is missing, so that both may be moved or deleted at any time.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from io import FileIO
from pathlib import Path

import trio

OFF, STDOUT = "off", "-"
QUEUE_BYTES = 8 * 1024 * 1024
GATHER_SECS = 0.1  # the cost of a flush, a thread hop and an open(), is shared by all its lines
LAST_FLUSH_SECS = 2
FAILURE_REPORT_SECS = 60

log = logging.getLogger(__name__)


class LineLog:
    """`write` queues lines, at most `max_queue_bytes`; `run` writes them to the target, which may
    change at any time."""

    def __init__(self, target: str = OFF, max_queue_bytes: int = QUEUE_BYTES) -> None:
        self._target = target
        self._max_queue_bytes = max_queue_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._filled = trio.Event()
        self._failure_reported_at = float("-inf")
        self._thread = trio.CapacityLimiter(1)
        self._torn = ""  # the target whose last line is incomplete
        self.dropped = 0  # lines that did not fit into the queue
        self.failed = 0  # lines that could not be written

    @property
    def on(self) -> bool:
        """False: the log is off, so lines need not be built."""
        return self._target != OFF

    def retarget(self, target: str) -> None:
        """Write to stdout ("-"), a path, or nowhere ("off"). Also applies to queued lines."""
        self._target = target

    def write(self, record: bytes) -> None:
        """Queue one line, without its line end."""
        if self._target == OFF:
            return
        if self._queued_bytes + len(record) > self._max_queue_bytes:
            self.dropped += 1
            return
        self._queue.append(record)
        self._queued_bytes += len(record)
        self._filled.set()

    def status(self) -> dict[str, object]:
        return {"target": self._target, "dropped": self.dropped, "failed": self.failed}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush until cancelled, then once more."""
        await self._flush(b"", 0)
        task_status.started()
        try:
            while True:
                await self._filled.wait()
                await trio.sleep(GATHER_SECS)
                await self._flush(*self._taken())
        finally:
            with trio.move_on_after(LAST_FLUSH_SECS, shield=True):
                await self._flush(*self._taken())

    def _taken(self) -> tuple[bytes, int]:
        lines = len(self._queue)
        blob = b"".join(record + b"\n" for record in self._queue)
        self._queue.clear()
        self._queued_bytes = 0
        self._filled = trio.Event()
        return blob, lines

    async def _flush(self, blob: bytes, lines: int) -> None:
        target = self._target
        if target == OFF:
            return
        try:
            # Abandoned on shutdown, which must not wait for the reader of a full stdout pipe.
            await trio.to_thread.run_sync(
                _put, target, blob, target == self._torn,
                limiter=self._thread, abandon_on_cancel=True,
            )  # fmt: skip
            self._torn = ""
        except _PartialWrite as error:
            self._torn = target
            self.failed += lines - error.lines
            self._report_failure(target, error)
        except (OSError, ValueError) as error:  # ValueError: stdout was closed
            self.failed += lines
            self._report_failure(target, error)

    def _report_failure(self, target: str, error: Exception) -> None:
        now = trio.current_time()
        if now - self._failure_reported_at >= FAILURE_REPORT_SECS:
            self._failure_reported_at = now
            log.warning(
                "log_write_failed target=%s lines_lost=%d error=%s", target, self.failed, error
            )


class _PartialWrite(OSError):
    """A partial write: `lines` whole lines are in the file, and a part of the next one."""

    def __init__(self, error: OSError, lines: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.lines = lines


def _put(target: str, blob: bytes, torn: bool) -> None:
    if target == STDOUT:
        if blob:
            sys.stdout.buffer.write(blob)
            sys.stdout.buffer.flush()
        return
    path = Path(target)
    try:
        file = path.open("ab", buffering=0)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    with file:
        if blob and torn and file.seekable() and file.tell():  # not a file created since
            file.write(b"\n")
        _put_all(file, blob)


def _put_all(file: FileIO, blob: bytes) -> None:
    """Raises OSError, or _PartialWrite if a part of `blob` has been written."""
    unwritten = memoryview(blob)
    while unwritten:
        try:
            unwritten = unwritten[file.write(unwritten) :]
        except OSError as error:
            written = blob[: len(blob) - len(unwritten)]
            if written:
                raise _PartialWrite(error, written.count(b"\n")) from None
            raise
