"""Lines for whoever reads stderr, who may stop reading: a paused terminal, a stuck log collector.

Invariant: `emit` never waits for the reader. What can leave at once leaves at once and in the
caller's turn, so that a crash loses nothing; the rest is carried by a thread that lives as long as
there is something to carry. Past a bound lines are lost, which is said once somebody reads again.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from typing import Final, TextIO

QUEUE_BYTES: Final = 4 * 1024 * 1024
LAST_SECS: Final = 1.0  # what waits at the end has so long to leave
_AT_ONCE_BYTES: Final = select.PIPE_BUF  # a pipe that says it is writable takes so much


class NonBlockingHandler(logging.StreamHandler[TextIO]):
    """A stream handler for a reader that may stall."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """As new: a forked child has the lines of its parent, and not the thread."""
        self._gate = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lost = 0
        self._carrier: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        fd = self._fd()
        if fd is None:  # no descriptor behind it, so nobody who could stall
            super().emit(record)
            return
        try:
            line = (self.format(record) + self.terminator).encode(errors="backslashreplace")
        except Exception:
            self.handleError(record)
            return
        with self._gate:
            if self._carrier is not None:
                self._put_behind(line)
                return
            if not _leaves_now(fd, line):
                self._put_behind(line)
                self._carrier = threading.Thread(target=self._carry, args=(fd,), daemon=True)
                self._carrier.start()

    def close(self) -> None:
        carrier = self._carrier
        if carrier is not None and carrier.is_alive():
            carrier.join(LAST_SECS)
        super().close()

    def _fd(self) -> int | None:
        try:
            return self.stream.fileno()
        except (OSError, ValueError, AttributeError):
            return None

    def _put_behind(self, line: bytes) -> None:
        if self._waiting_bytes + len(line) > QUEUE_BYTES:
            self._lost += 1
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    def _carry(self, fd: int) -> None:
        """In a thread: what waits, in its order. A reader that is gone costs all of it."""
        while (lines := self._taken()) is not None:
            try:
                while lines:
                    lines = lines[os.write(fd, lines) :]
            except OSError:
                continue

    def _taken(self) -> bytes | None:
        """All that waits; None, and the thread has no work any more, where nothing does."""
        with self._gate:
            if not self._waiting:
                self._carrier = None
                return None
            if self._lost:
                said = f"{self._lost} lines of this log were lost: nobody took them\n"
                self._waiting.append(said.encode())
                self._lost = 0
            lines = b"".join(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            return lines


def _leaves_now(fd: int, line: bytes) -> bool:
    """Write it, unless that might have to wait. A file that takes nothing costs the line."""
    if len(line) > _AT_ONCE_BYTES or os.isatty(fd):  # a terminal does not say how much it takes
        return False
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    if not ready.poll(0):
        return False
    try:
        os.write(fd, line)
    except BlockingIOError:  # somebody else made it non-blocking
        return False
    except OSError:
        pass
    return True
