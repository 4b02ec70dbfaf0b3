"""The program's own log: lines on stderr, as text or JSON, and in a file where one is configured.

Invariant: `configure` may be called at any time and leaves exactly one handler of this module for
each of the two on the root logger; other handlers are not touched. Neither a reader of stderr that
does not read nor a slow disk blocks anything. A line holds no secret of a query and no terminal
control sequence.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from omni_proxy.system.nonblocking_stderr import NonBlockingHandler
from omni_proxy.telemetry import line_log
from omni_proxy.telemetry.line_log import LineLog
from omni_proxy.wire.log_text import ascii_json, escape_unprintable, mask_secrets_in_text

# They log each request, or each event of a watched folder, at level info.
CHATTY = ("httpx", "httpcore", "hpack", "watchfiles")


class _Writer(NonBlockingHandler):
    """Marks the program's own handler."""


class _Copier(logging.Handler):
    """Ours, too: hands each line to the log of the file."""

    def __init__(self, lines: LineLog) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        # Its own error message would go to the same handler.
        if self._lines.on and record.name != line_log.__name__:
            self._lines.write(self.format(record).encode(errors="backslashreplace"))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": mask_secrets_in_text(record.getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = mask_secrets_in_text(self.formatException(record.exc_info))
        return ascii_json(msgspec.json.encode(fields)).decode()


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return escape_unprintable(mask_secrets_in_text(super().format(record)))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")


def configure(level: str, format_: str, file: LineLog | None = None) -> None:
    """`level` as in `[server] log_level`; `format_` is "text" or "json". `file` gets all lines,
    from the first call that names it."""
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
