"""The text of a request for prefix matching, in the order in which a worker reads it.

Invariant: every decoded body gives bytes, in time bounded by `limit`, not by the body. Texts are
UTF-8 with lone surrogates unchanged, separated by bytes that never occur in UTF-8, so that
different structures give different texts. The same body gives the same text in every process.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from operator import attrgetter

import msgspec

from omni_proxy.routing.inspect.body_fields import (
    ABSENT,
    CONSTANT_GROWTH,
    BodyFields,
    KeyedBodyFields,
    NonStandardBodyFields,
    is_given,
    is_list,
    read_elements,
    read_value,
    restore_constants,
    starts_with,
)
from omni_proxy.shared.decoding import MALFORMED

LIMIT = 64 * 1024  # bytes; later text hardly changes where a prefix is cached
MAX_NAME_CHARS = 32
MAX_PIECES = 8192  # roles, parts, prompts: limits the work for millions of empty ones
# One byte each: with longer marks, short texts would match by their marks.
ROLES = {
    "system": b"\xf5", "user": b"\xf6", "assistant": b"\xf7", "tool": b"\xf8", "developer": b"\xf9",
}  # fmt: skip
SYSTEM_KEYS = frozenset(("system", "instructions"))
# The start of a list of numbers, which is matched as spelled in the body.
_TOKEN_IDS = re.compile(rb"\[\s*-?[0-9]")
_SEVERAL = re.compile(rb"\[\s*[\[\"]")
_LOOK_BYTES = 64
NAME, NAME_END, PART, SCRIPT, TOKENS = b"\xfa", b"\xfb", b"\xfc", b"\xfd", b"\xfe"


class _PlainPart(msgspec.Struct, gc=False):
    text: str | None = None
    type: str | None = None


class _PlainMessage(msgspec.Struct, gc=False):
    """A message in the usual form."""

    role: str
    content: str | list[_PlainPart]


class _Piece(msgspec.Struct, gc=False):
    """A message, or a part of one."""

    role: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    type: msgspec.Raw = ABSENT


_decode_messages = msgspec.json.Decoder(list[_PlainMessage]).decode
_decode_piece = msgspec.json.Decoder(_Piece).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode


# Absent in every chat of the Chat Completions API.
_beside_messages = attrgetter("system", "prompt", "text", "input_ids", "token_ids")
_MESSAGES_ONLY = (ABSENT,) * 5


def prefix_text(payload: BodyFields | None, limit: int = LIMIT) -> bytes:
    """At most `limit` bytes, the first of which is a mark; b"" for a body without any of `system`,
    `messages`, `prompt`, `text`, `input_ids` and `token_ids`."""
    if payload is None:
        return b""
    if type(payload) is NonStandardBodyFields:
        return restore_constants(_collect_text(payload, limit * CONSTANT_GROWTH))[:limit]
    if _beside_messages(payload) == _MESSAGES_ONLY:
        plain = _plain_messages(payload.messages, limit)
        if plain is not None:
            return plain
    return _collect_text(payload, limit)


def has_one_prompt(payload: BodyFields | None) -> bool:
    """Whether the body is one prompt, not a list of prompts."""
    if payload is None or _beside_messages(payload) == _MESSAGES_ONLY:
        return True
    several = (payload.prompt, payload.text, payload.input_ids)
    return not any(_SEVERAL.match(bytes(memoryview(raw)[:_LOOK_BYTES])) for raw in several)


def prompt_bytes(payload: BodyFields) -> int:
    """Approximate length of the whole text, as spelled in the body and not cut."""
    return len(payload.messages) + sum(map(len, _beside_messages(payload)))


def _plain_messages(messages: msgspec.Raw, limit: int) -> bytes | None:
    """The prefix text of messages in the usual form with known roles; else None."""
    if not len(messages):
        return None
    try:
        decoded = _decode_messages(messages)
    except MALFORMED:
        return None
    budget = MAX_PIECES - 2 * len(decoded)
    if budget < 0:
        return None
    pieces: list[bytes] = []
    try:
        for element in decoded:
            content = element.content
            if isinstance(content, str):
                pieces += ROLES[element.role], content[:limit].encode()
            else:
                budget -= len(content)
                if budget < 0:
                    return None
                pieces += ROLES[element.role], _plain_parts(content, limit)
    except LookupError:
        return None
    text = b"".join(pieces)
    return text if len(text) <= limit else None


def _plain_parts(parts: list[_PlainPart], limit: int) -> bytes:
    is_given = [
        _name(part.type) if part.text is None else _utf8(part.text, limit) for part in parts
    ]
    return PART + PART.join(is_given) if is_given else b""


def _collect_text(payload: BodyFields, limit: int) -> bytes:
    collector = _TextCollector(limit)
    for text in _pieces(payload, limit):
        if not collector.add(text):
            break
    return bytes(collector.text)


class _TextCollector:
    """Collects bytes up to a limit."""

    __slots__ = ("_left", "_looks", "text")

    def __init__(self, limit: int) -> None:
        self.text = bytearray()
        self._left = limit
        self._looks = MAX_PIECES

    def add(self, text: bytes) -> bool:
        """Returns whether there is room for more."""
        self.text += text[: self._left]
        self._left -= len(text)
        self._looks -= 1
        return self._left > 0 and self._looks > 0


def _pieces(payload: BodyFields, limit: int) -> Iterator[bytes]:
    if isinstance(payload, KeyedBodyFields):
        for key, value in payload.keyed:
            yield from _keyed(key, value, limit)
    if is_given(payload.system):
        yield from _keyed("system", payload.system, limit)
    for message in read_elements(payload.messages):
        yield from _message(message, limit)
    for value in (payload.prompt, payload.text):
        if is_given(value):
            yield from _script(value, limit)
    for ids in (payload.input_ids, payload.token_ids):
        if is_given(ids):  # undecoded: sufficient for a prefix
            yield TOKENS + bytes(memoryview(ids)[:limit])


def _keyed(key: str, value: msgspec.Raw, limit: int) -> Iterator[bytes]:
    """The text of a value: a text, token ids, parts, messages, or a list of these. A system prompt
    is marked like a system message."""
    text = _text(value)
    role = ROLES["system"] if key in SYSTEM_KEYS else b""
    if text is not None:
        yield (role or SCRIPT) + _utf8(text, limit)
    elif starts_with(value, b"{"):
        yield from _item(value, limit)
    elif _TOKEN_IDS.match(bytes(memoryview(value)[:_LOOK_BYTES])):
        yield TOKENS + bytes(memoryview(value)[:limit])
    else:
        yield role
        for element in read_elements(value):
            if starts_with(element, b"{"):
                yield from _item(element, limit)
            else:
                yield from _script(element, limit)


def _item(raw: msgspec.Raw, limit: int) -> Iterator[bytes]:
    """A message if it has a role, else a part."""
    item = _read(raw)
    says_role = item is not None and is_given(item.role)
    yield from _message(raw, limit) if says_role else _part(raw, limit)


def _read(raw: msgspec.Raw) -> _Piece | None:
    """None if the value is not an object."""
    if not starts_with(raw, b"{"):
        return None
    try:
        return _decode_piece(raw)
    except MALFORMED:  # nested too deeply
        return _Piece()


def _text(raw: msgspec.Raw) -> str | None:
    """None if the value is not a string."""
    value = read_value(raw) if starts_with(raw, b'"') else None
    return value if isinstance(value, str) else None


def _message(raw: msgspec.Raw, limit: int) -> Iterator[bytes]:
    message = _read(raw)
    if message is None:
        yield NAME
        return
    role = _text(message.role)
    yield (role is not None and ROLES.get(role)) or _name(role)
    content = _text(message.content)
    if content is not None:
        yield _utf8(content, limit)
    for part in read_elements(message.content):
        yield from _part(part, limit)


def _part(raw: msgspec.Raw, limit: int) -> Iterator[bytes]:
    """A part's text, or else its type: URLs or bytes of images are no use as a prefix."""
    spoken = _text(raw)
    if spoken is not None:
        yield PART + _utf8(spoken, limit)
        return
    part = _read(raw)
    if part is not None:
        text = _text(part.text)
        yield PART + (_name(_text(part.type)) if text is None else _utf8(text, limit))


def _script(raw: msgspec.Raw, limit: int) -> Iterator[bytes]:
    """A text, token ids, or a list of either."""
    text = _text(raw)
    if text is not None:
        yield SCRIPT + _utf8(text, limit)
        return
    elements = read_elements(raw)
    if elements and _is_number(elements[0]):
        yield TOKENS + _tokens(raw, limit)
        return
    for element in elements:
        text = _text(element)
        if text is not None:
            yield SCRIPT + _utf8(text, limit)
        elif is_list(element):
            yield TOKENS + _tokens(element, limit)
        else:
            yield SCRIPT


def _is_number(raw: msgspec.Raw) -> bool:
    """Whether Python decodes the value as an int, which includes true and false."""
    return (
        not starts_with(raw, b"[")
        and not starts_with(raw, b"{")
        and isinstance(read_value(raw), int)
    )


def _name(name: str | None) -> bytes:
    """The marked name of a role or of a type of part."""
    return NAME if name is None else NAME + _utf8(name, MAX_NAME_CHARS) + NAME_END


def _tokens(raw: msgspec.Raw, limit: int) -> bytes:
    """Four bytes per token, about the mean length of a token's text."""
    ids: list[int]
    try:
        ids = _decode_ids(raw)[: limit // 4]
    except MALFORMED:
        ids = [
            read_value(element)
            for element in read_elements(raw)[: limit // 4]
            if _is_number(element)
        ]
    try:
        return array("I", ids).tobytes()
    except OverflowError:  # not token ids
        return array("I", (number & 0xFFFFFFFF for number in ids)).tobytes()


def _utf8(text: str, limit: int) -> bytes:
    return text[:limit].encode("utf-8", "surrogatepass")
