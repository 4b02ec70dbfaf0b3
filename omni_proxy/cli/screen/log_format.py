"""A line of the access log or the route log as a person reads it.

PURE. Invariant: what is no record of ours comes out as it is, made harmless; nothing raises.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from omni_proxy.cli.screen.text_table import format_millis, parse_time, printable
from omni_proxy.wire.log_text import mask_secrets_in_text

# Of the access log; of the route log where its name for the same thing differs.
_NAMES: Final = {
    "timestamp": "at",
    "path": "target",
    "status_code": "status",
    "worker_url": "worker",
    "error_type": "error",
    "attempt": "attempts",
}

_TEXT: Final = re.compile(
    r"(?P<at>\S+) (?P<client>\S+) (?P<method>[A-Z]+) (?P<target>\S+) (?P<status>[0-9]{1,3}) "
    r"(?P<outcome>[a-z_]+)(?: (?P<rest>.*))?"
)
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_DECIMAL: Final = re.compile(r"[0-9]{1,18}\.[0-9]{1,9}")
_NAMED: Final = ("request_id", "model")  # by whoever asks: never a number
_ESCAPED: Final = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt\\])")


def raw_line(line: bytes) -> str:
    """But for secrets in queries, which older versions wrote."""
    return mask_secrets_in_text(line.decode(errors="replace"))


def pretty_line(line: bytes) -> str:
    """`10:00:01.204  200   840 ms  POST /v1/chat/completions  127.0.0.1:8011  completed ...`."""
    try:
        told = msgspec.json.decode(raw_line(line))
    except (msgspec.DecodeError, UnicodeError):
        told = _of_text(raw_line(line))
    if not isinstance(told, dict) or not {"at", "timestamp"} & told.keys():
        return printable(raw_line(line).rstrip("\r"))
    record: dict[str, Any] = {
        _NAMES.get(str(name), str(name)): value for name, value in told.items()
    }
    first = "  ".join(
        (
            _clock(record.get("at")),
            f"{printable(record.get('status') or '---'):>3}",
            f"{format_millis(_number(record, 'total_ms', 'duration_s')):>7}",
            f"{printable(record.get('method', ''))} {printable(record.get('target', ''))}",
            printable(str(record.get("worker") or "-").removeprefix("http://")),
            printable(_outcome(record)),
        )
    )
    return "  ".join([first, *_more(record)])


def _of_text(line: str) -> dict[str, object] | None:
    """What a line of `log_format = "text"` says; None where it could be read in another way."""
    found = _TEXT.fullmatch(line)
    if found is None or parse_time(found["at"]) is None:
        return None
    record: dict[str, object] = {**found.groupdict()}
    rest = str(record.pop("rest") or "")
    for part in rest.split(" ") if rest else ():
        name, equals, value = part.partition("=")
        if not equals or name in record:
            return None
        record[name] = _plainly(value) if name in _NAMED else _told(value)
    return record


def _plainly(value: str) -> str:
    """What stands in the log as one word, as it was said."""
    return _ESCAPED.sub(lambda found: found[0].encode().decode("unicode_escape"), value)


def _told(value: str) -> object:
    if _WHOLE.fullmatch(value):
        return int(value)
    return float(value) if _DECIMAL.fullmatch(value) else _plainly(value)


def _clock(at: object) -> str:
    when = parse_time(at if isinstance(at, str) else None)
    return when.astimezone().isoformat(" ", "milliseconds")[11:23] if when else printable(at)


def _number(record: dict[str, Any], millis_key: str, secs_key: str) -> float | None:
    value, factor = record.get(millis_key), 1.0
    if value is None:
        value, factor = record.get(secs_key), 1000.0
    return value * factor if isinstance(value, int | float) else None


def _outcome(record: dict[str, Any]) -> object:
    if "outcome" in record:
        return record["outcome"]
    if record.get("client_disconnected"):
        return "client_disconnected"
    return "completed" if record.get("completed") else record.get("event", "")


def _more(record: dict[str, Any]) -> list[str]:
    """What is only worth its place where it is unusual."""
    words = []
    if (first := _number(record, "first_ms", "ttfb_s")) is not None and record.get("stream"):
        words.append(f"first {format_millis(first)}")
    if isinstance(queued := record.get("queue_ms"), int | float) and queued >= 1:
        words.append(f"queued {format_millis(queued)}")
    if record.get("model"):
        words.append(f"model {printable(record['model'])}")
    if isinstance(attempts := record.get("attempts"), int) and attempts > 1:
        words.append(f"{attempts} attempts")
    if record.get("error"):
        words.append(f"error {printable(record['error'])}")
    if record.get("ended_by"):
        words.append(f"by {printable(record['ended_by'])} in {printable(record.get('phase', '?'))}")
    if record.get("request_id"):
        words.append(f"id {printable(record['request_id'])}")
    return words
