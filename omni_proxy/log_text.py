"""Untrusted text made safe for logs: secrets in queries masked, control characters escaped.

Invariant: the result has no value of a query parameter named in SECRETS, in any case or percent
encoding, and no character that a terminal interprets or that ends a line. Pure.
"""

from __future__ import annotations

import re
from typing import Final

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
