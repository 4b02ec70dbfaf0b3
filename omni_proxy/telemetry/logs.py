"""The program's own log: lines on stderr, as text or JSON, and in a file if one is configured.

Invariants: `configure` may be called at any time and leaves exactly one handler of this module for
each of the two on the root logger; other handlers are not touched. Neither a stalled reader of
stderr nor a slow disk blocks a caller: a line that can be written without blocking is written in
the calling thread, so that a crash does not lose it; others are queued for a thread, and beyond
`QUEUE_BYTES` they are dropped and counted. A line contains no secret of a query and no terminal
control sequence.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from typing import Final, TextIO

import msgspec

from omni_proxy.shared.log_text import (
    LINE_FORMAT,
    LogfmtFormatter,
    ascii_json,
    escape_unprintable,
    mask_secrets_in_text,
    with_quoted_values,
)
from omni_proxy.telemetry import line_log
from omni_proxy.telemetry.line_log import LineLog

QUEUE_BYTES: Final = 4 * 1024 * 1024
WRITER_THREAD: Final = "log-writer"
CLOSE_SECS: Final = 1.0  # how long `close` waits for the queue to be written
_ATOMIC_BYTES: Final = select.PIPE_BUF  # a pipe that polls as writable has room for this much


class NonBlockingHandler(logging.StreamHandler[TextIO]):
    """A stream handler that does not block if the stream's reader stalls. A thread named
    `WRITER_THREAD` writes what would block, at most `max_queue_bytes`."""

    def __init__(self, stream: TextIO, max_queue_bytes: int = QUEUE_BYTES) -> None:
        super().__init__(stream)
        self._max_queue_bytes = max_queue_bytes
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
        if fd is None:  # the stream has no file descriptor, so it can't block
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
                self._writer = threading.Thread(
                    target=self._write_queue, args=(fd,), name=WRITER_THREAD, daemon=True
                )
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
        if self._queue_bytes + len(line) > self._max_queue_bytes:
            self._dropped += 1
            return
        self._queue.append(line)
        self._queue_bytes += len(line)

    def _write_queue(self, fd: int) -> None:
        """Runs in the thread. Lines taken from the queue are lost if the reader has closed."""
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
    """Write the line. False if the write might block; if it fails, the line is lost."""
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


# These libraries log each request, or each event of a watched folder, at level info.
CHATTY = ("httpx", "httpcore", "hpack", "watchfiles")


class _Writer(NonBlockingHandler):
    """The handler for stderr; a class of its own, so that `configure` can find it."""


class _Copier(logging.Handler):
    """The handler for the file: writes each line to its `LineLog`."""

    def __init__(self, lines: LineLog) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        # Warnings of the LineLog itself must not be written to the file that fails.
        if self._lines.on and record.name != line_log.__name__:
            self._lines.write(self.format(record).encode(errors="backslashreplace"))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": mask_secrets_in_text(with_quoted_values(record).getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = mask_secrets_in_text(self.formatException(record.exc_info))
        return ascii_json(msgspec.json.encode(fields)).decode()


class _Text(LogfmtFormatter):
    def __init__(self) -> None:
        super().__init__(LINE_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return escape_unprintable(mask_secrets_in_text(super().format(record)))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")


def configure(level: str, format_: str, file: LineLog | None = None) -> None:
    """Set up the root logger. `level`: as in `[server] log_level`. `format_`: "text" or "json".
    `file`: also receives all lines, from the first call that passes it."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in CHATTY:
        quiet = logging.INFO if level == "debug" else logging.WARNING
        logging.getLogger(name).setLevel(quiet)
    if not _ours(_Writer):
        root.addHandler(_Writer(sys.stderr))
    if file is not None and not _ours(_Copier):
        root.addHandler(_Copier(file))
    for handler in (*_ours(_Writer), *_ours(_Copier)):
        handler.setFormatter(_Json() if format_ == "json" else _Text())


def _ours(kind: type[logging.Handler]) -> list[logging.Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, kind)]
