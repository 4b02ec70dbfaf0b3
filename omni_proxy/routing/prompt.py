"""The text of a request by which prefixes are compared: what a worker would read first, first.

Invariant: any decoded body gives bytes, in time bounded by `limit` and not by the body. Texts are
UTF-8 with lone surrogates as they are, and between them stand bytes that UTF-8 never has, so that
different structures give different texts. Same body, same text, in every process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from omni_proxy.routing.inspect import Payload

LIMIT = 64 * 1024  # bytes; what comes later hardly changes where a prefix is cached
MAX_NAME_CHARS = 32
MAX_PIECES = 8192  # roles, parts, prompts: a body of a million empty ones is not read whole
# One byte each: were they longer, short texts would be alike by their marks alone.
ROLES = {
    "system": b"\xf5", "user": b"\xf6", "assistant": b"\xf7", "tool": b"\xf8", "developer": b"\xf9",
}  # fmt: skip
NAME, NAME_END, PART, SCRIPT, TOKENS = b"\xfa", b"\xfb", b"\xfc", b"\xfd", b"\xfe"
_NONE = msgspec.Raw()
_NULL = msgspec.Raw(b"null")


def prefix_text(payload: Payload | None, limit: int = LIMIT) -> bytes:
    """At most `limit` bytes, the first of which is a mark; b"" for a body without messages,
    `prompt`, `text` and `input_ids`."""
    if payload is None:
        return b""
    ids: object = payload.input_ids
    if payload.prompt is None and payload.text is None and ids == _NONE:
        plain = _plain_talk(payload.messages, limit)
        if plain is not None:
            return plain
    gathered = _Gathered(limit)
    for piece in _pieces(payload, limit):
        if not gathered.add(piece):
            break
    return bytes(gathered.text)


def _plain_talk(messages: object, limit: int) -> bytes | None:
    """The same of messages that are nothing but texts in known roles, as most are; else None."""
    if not isinstance(messages, list) or 2 * len(messages) > MAX_PIECES:
        return None
    pieces: list[bytes] = []
    try:
        for message in messages:
            pieces += ROLES[message["role"]], message["content"][:limit].encode()
    except (TypeError, LookupError, AttributeError, UnicodeEncodeError):
        return None
    text = b"".join(pieces)
    return text if len(text) <= limit else None


class _Gathered:
    """Bytes up to a bound."""

    __slots__ = ("_left", "_looks", "text")

    def __init__(self, limit: int) -> None:
        self.text = bytearray()
        self._left = limit
        self._looks = MAX_PIECES

    def add(self, piece: bytes) -> bool:
        """Whether there is room for more."""
        self.text += piece[: self._left]
        self._left -= len(piece)
        self._looks -= 1
        return self._left > 0 and self._looks > 0


def _pieces(payload: Payload, limit: int) -> Iterator[bytes]:
    if isinstance(payload.messages, list):
        for message in payload.messages:
            yield from _message(message, limit)
    for value in (payload.prompt, payload.text):
        if value is not None:
            yield from _script(value, limit)
    ids: object = payload.input_ids
    if not isinstance(ids, msgspec.Raw):  # from the slower reader of odd JSON
        yield from _script(ids, limit)
    elif len(ids) and ids != _NULL:
        yield TOKENS + bytes(memoryview(ids)[:limit])


def _message(message: object, limit: int) -> Iterator[bytes]:
    if not isinstance(message, dict):
        yield NAME
        return
    role = message.get("role")
    yield (isinstance(role, str) and ROLES.get(role)) or _name(role)
    content = message.get("content")
    if isinstance(content, str):
        yield _utf8(content, limit)
    elif isinstance(content, list):
        for part in content:
            yield from _part(part, limit)


def _part(part: object, limit: int) -> Iterator[bytes]:
    """A part's text, or only its kind: of a picture the address says little and its bytes a lot."""
    if isinstance(part, str):
        yield PART + _utf8(part, limit)
    elif isinstance(part, dict):
        text, kind = part.get("text"), part.get("type")
        if isinstance(text, str):
            yield PART + _utf8(text, limit)
        else:
            yield PART + _name(kind)


def _script(value: object, limit: int) -> Iterator[bytes]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str):
        yield SCRIPT + _utf8(value, limit)
    elif isinstance(value, list):
        if value and isinstance(value[0], int):
            yield TOKENS + _tokens(value, limit)
            return
        for one in value:
            if isinstance(one, str):
                yield SCRIPT + _utf8(one, limit)
            elif isinstance(one, list):
                yield TOKENS + _tokens(one, limit)
            else:
                yield SCRIPT


def _name(name: object) -> bytes:
    """Of a role or a kind of part."""
    return NAME + _utf8(name, MAX_NAME_CHARS) + NAME_END if isinstance(name, str) else NAME


def _tokens(ids: list[object], limit: int) -> bytes:
    """Four bytes each, about what a token is as text."""
    numbers = (number & 0xFFFFFFFF for number in ids[: limit // 4] if isinstance(number, int))
    return array("I", numbers).tobytes()


def _utf8(text: str, limit: int) -> bytes:
    return text[:limit].encode("utf-8", "surrogatepass")
