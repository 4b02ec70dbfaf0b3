"""Text of logs: values quoted, secrets in queries masked, control characters escaped.

Invariants: a value of `key=%s` in a log line is one word or in quotes, as in logfmt, whatever it
contains: callers write no quotes. Masked text has no value of a query parameter named in SECRETS,
in any case or percent encoding; escaped text has no character that a terminal interprets or that
ends a line. Must use only the standard library, because every process of the program logs.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from functools import lru_cache
from typing import Final

LINE_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_PLAIN_VALUE: Final = re.compile(r"[^\s\x00-\x1f\x7f\"=]+")
_CONVERSION: Final = re.compile(r"%[#0 +-]*\d*(?:\.\d+)?[a-zA-Z%]")

SECRETS: Final = (
    "api_key", "api-key", "apikey", "x-api-key", "key", "token", "access_token", "authorization",
    "auth", "password", "secret",
)  # fmt: skip
MASK: Final = "***"


def _either_way(char: str) -> str:
    codes = {f"%{ord(each):02x}" for each in (char, char.upper())}
    return f"(?:{re.escape(char)}|{'|'.join(sorted(codes))})"


_NAMES: Final = "|".join("".join(map(_either_way, name)) for name in SECRETS)
_IN_TARGET: Final = re.compile(rf"([?&;](?:{_NAMES})=)[^&]+", re.IGNORECASE)
_IN_TEXT: Final = re.compile(rf'([?&;](?:{_NAMES})=)[^&\s"]+', re.IGNORECASE)
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7e]")
_UNPRINTABLE: Final = re.compile(r"[^\n\t\x20-\x7e]")


def quote_value(text: str) -> str:
    """A value of a log line: in quotes, with the escapes of JSON, unless it is one plain word."""
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


@lru_cache(maxsize=1024)
def _value_positions(template: str) -> tuple[int, ...]:
    """The positions of the arguments that are values."""
    if "*" in template:  # a width may be an argument, too; no line of this program has one
        return ()
    found = [each for each in _CONVERSION.finditer(template) if each[0] != "%%"]
    return tuple(
        number
        for number, each in enumerate(found)
        if each[0] == "%s" and template[: each.start()].endswith("=")
    )


def with_quoted_values(record: logging.LogRecord) -> logging.LogRecord:
    """The record with the values of `key=%s` quoted."""
    if not isinstance(record.msg, str) or not isinstance(record.args, tuple):
        return record
    positions = _value_positions(record.msg)
    if not positions or len(record.args) <= positions[-1]:
        return record
    values = list(record.args)
    for at in positions:
        values[at] = quote_value(str(values[at]))
    quoted = copy.copy(record)  # other handlers get the same record
    quoted.args = tuple(values)
    return quoted


class LogfmtFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(with_quoted_values(record))


def log_to_stderr(level: int | str) -> None:
    """For programs that have no configurable log."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogfmtFormatter(LINE_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


def mask_secrets(target: str) -> str:
    """A request target (RFC 9112 3.2) without the secrets of its query."""
    return _IN_TARGET.sub(rf"\1{MASK}", target) if "?" in target else target


def mask_secrets_in_text(text: str) -> str:
    """Mask the secrets of all targets and URLs in a text. A value ends at a blank or a quote."""
    return _IN_TEXT.sub(rf"\1{MASK}", text) if "?" in text else text


def ascii_json(record: bytes) -> bytes:
    """Escape JSON so that it is printable ASCII with the same meaning (RFC 8259 7)."""
    if record.isascii() and b"\x7f" not in record:
        return record
    return _NOT_ASCII.sub(_as_json, record.decode()).encode()


def escape_unprintable(text: str) -> str:
    """Escape unprintable characters, except for line ends and tabs, as in a Python string."""
    return text if text.isascii() and text.isprintable() else _UNPRINTABLE.sub(escape_match, text)


def escape_match(found: re.Match[str]) -> str:
    """For `re.sub`: keeps printable non-ASCII characters, and escapes all others."""
    char = found[0]
    if char.isprintable() and not char.isascii():
        return char
    return char.encode("unicode_escape").decode()


def _as_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
