"""A log handler for stderr that never blocks: its reader may be a paused terminal or a stuck log
collector.

Invariant: `emit` never waits for the reader. A line that can be written at once is written at once,
in the calling thread, so a crash loses none of it; other lines are queued, and a thread writes them
until the queue is empty. Lines beyond `QUEUE_BYTES` are dropped, and the log says how many.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from typing import Final, TextIO

QUEUE_BYTES: Final = 4 * 1024 * 1024
CLOSE_SECS: Final = 1.0  # for the queue to be written at the end
_ATOMIC_BYTES: Final = select.PIPE_BUF  # a pipe that polls as writable takes so much at once


class NonBlockingHandler(logging.StreamHandler[TextIO]):
    """A stream handler whose reader may stall."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """A forked child inherits the queue of its parent, but not the thread that writes it."""
        self._queue_lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._queue_bytes = 0
        self._dropped = 0
        self._writer: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        fd = self._fd()
        if fd is None:  # no descriptor behind the stream, so nothing can stall
            super().emit(record)
            return
        try:
            line = (self.format(record) + self.terminator).encode(errors="backslashreplace")
        except Exception:
            self.handleError(record)
            return
        with self._queue_lock:
            if self._writer is not None:
                self._enqueue(line)
                return
            if not _write_at_once(fd, line):
                self._enqueue(line)
                self._writer = threading.Thread(target=self._write_queue, args=(fd,), daemon=True)
                self._writer.start()

    def close(self) -> None:
        writer = self._writer
        if writer is not None and writer.is_alive():
            writer.join(CLOSE_SECS)
        super().close()

    def _fd(self) -> int | None:
        try:
            return self.stream.fileno()
        except (OSError, ValueError, AttributeError):
            return None

    def _enqueue(self, line: bytes) -> None:
        if self._queue_bytes + len(line) > QUEUE_BYTES:
            self._dropped += 1
            return
        self._queue.append(line)
        self._queue_bytes += len(line)

    def _write_queue(self, fd: int) -> None:
        """Runs in the thread. Lines taken from the queue are lost if the reader is gone."""
        while (lines := self._take_queue()) is not None:
            try:
                while lines:
                    lines = lines[os.write(fd, lines) :]
            except OSError:
                continue

    def _take_queue(self) -> bytes | None:
        """All queued lines in order; None for an empty queue, which ends the thread."""
        with self._queue_lock:
            if not self._queue:
                self._writer = None
                return None
            if self._dropped:
                self._queue.append(f"log_lines_dropped lines={self._dropped}\n".encode())
                self._dropped = 0
            lines = b"".join(self._queue)
            self._queue.clear()
            self._queue_bytes = 0
            return lines


def _write_at_once(fd: int, line: bytes) -> bool:
    """Write the line, unless the write might block. An error of a file or pipe loses the line."""
    if len(line) > _ATOMIC_BYTES or os.isatty(fd):  # a terminal doesn't report how much it accepts
        return False
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        return False
    try:
        os.write(fd, line)
    except BlockingIOError:  # another process made the descriptor non-blocking
        return False
    except OSError:
        pass
    return True
