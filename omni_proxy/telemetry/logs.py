"""The program's own log: lines on stderr, as text or JSON.

Invariant: `configure` may be called at any time and leaves exactly one handler of this module on
the root logger; other handlers are not touched. A reader of stderr that does not read blocks
nothing. A line holds no secret of a query and no terminal control sequence.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from omni_proxy.system.nonblocking_stderr import NonBlockingHandler
from omni_proxy.wire.log_text import ascii_json, escape_unprintable, mask_secrets_in_text

# They tell each request, or each touch of a watched folder, at level info.
CHATTY = ("httpx", "httpcore", "hpack", "watchfiles")


class _Writer(NonBlockingHandler):
    """Ours, to be told from others."""


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


def configure(level: str, format_: str) -> None:
    """`level` as in `[server] log_level`; `format_` is "text" or "json"."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in CHATTY:
        quiet = logging.INFO if level == "debug" else logging.WARNING
        logging.getLogger(name).setLevel(quiet)
    ours = next((handler for handler in root.handlers if isinstance(handler, _Writer)), None)
    if ours is None:
        ours = _Writer(sys.stderr)
        root.addHandler(ours)
    ours.setFormatter(_Json() if format_ == "json" else _Text())
