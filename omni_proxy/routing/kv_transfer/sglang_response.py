"""Rewrites a decode engine's response for the client: its `rid`, and all log probabilities.

The decode engine has neither the id that the client sent, nor the log probabilities of the prompt,
which the prefill engine computed and which are put before its own. Invariant: all other bytes are
unchanged. Responses that can't be parsed are passed on unchanged. Source: features.md 2.1, 2.7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import (
    is_list,
    read_elements,
    read_value,
    starts_with,
)
from omni_proxy.routing.inspect.json_splice import Edits, JsonText, splice
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.response import UpstreamProtocolError

LOGPROBS: Final = "input_token_logprobs"
META: Final = "meta_info"
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
_BLANK_LINE: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_BLANK_BYTES: Final = 4
_DATA: Final = re.compile(rb"(?m)^(data: ?)(\{.*\})\r?$")

Logprobs = Mapping[int, bytes]  # by index of the prompt: the elements of its list, as JSON


def is_one_id(given: bytes) -> bool:
    """Whether this `rid`, given as JSON, is one id for the whole request."""
    return given.startswith(b'"') and given != b'""'


class ClientIds:
    """Replaces the proxy's ids by the client's. `given`: the client's `rid` as JSON."""

    __slots__ = ("_base", "_by_number", "_whole")

    def __init__(self, rid: str, given: bytes) -> None:
        raw = msgspec.Raw(given)
        self._base = rid.encode()
        self._whole = given[1:-1] if starts_with(raw, b'"') else b""
        self._by_number = [
            bytes(item)[1:-1] if starts_with(item, b'"') else b"" for item in read_elements(raw)
        ]

    def restore(self, text: bytes) -> bytes:
        if self._base not in text:
            return text
        if self._whole:
            return text.replace(self._base, self._whole)
        pattern = re.compile(re.escape(self._base) + rb"(?:_([0-9]{1,9}))?\b")
        return pattern.sub(self._numbered, text)

    def _numbered(self, found: re.Match[bytes]) -> bytes:
        number = int(found[1] or 0)  # without a number it is not a batch
        known = self._by_number[number] if number < len(self._by_number) else b""
        return known or found[0]


class ResponseRewriter:
    """Rewrites one response. `ids`: None if the client sent none; `logprobs`: those of prefill."""

    __slots__ = ("_ids", "_logprobs", "_rest")

    def __init__(self, ids: ClientIds | None, logprobs: Logprobs) -> None:
        self._ids = ids
        self._logprobs = logprobs
        self._rest = bytearray()

    def rewrite_body(self, body: bytes) -> bytes:
        """Rewrite a non-streaming response: an object, or a list of objects for a batch."""
        if self._logprobs:
            body = _merged_batch(body, self._logprobs)
        return body if self._ids is None else self._ids.restore(body)

    def feed(self, payload: bytes) -> bytes:
        """Add a chunk of a stream; returns the rewritten events that are complete now. Raises
        UpstreamProtocolError if an event exceeds `MAX_EVENT_BYTES`."""
        rest = self._rest
        start = max(0, len(rest) - _BLANK_BYTES + 1)  # earlier bytes were searched already
        rest += payload
        end = max((found.end() for found in _BLANK_LINE.finditer(rest, start)), default=0)
        if not end:
            if len(rest) > MAX_EVENT_BYTES:
                raise UpstreamProtocolError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            return b""
        events = bytes(rest[:end])
        del rest[:end]
        return self._rewrite_events(events)

    def finish(self) -> bytes:
        """At the end of the stream: the bytes after the last complete event, rewritten."""
        rest = bytes(self._rest)
        self._rest.clear()
        return self._rewrite_events(rest)

    def _rewrite_events(self, events: bytes) -> bytes:
        if self._logprobs:
            events = _DATA.sub(self._merged_event, events)
        return events if self._ids is None else self._ids.restore(events)

    def _merged_event(self, found: re.Match[bytes]) -> bytes:
        prefix, event = found[1], found[2]
        end = found[0][len(prefix) + len(event) :]
        return prefix + _merged(event, self._logprobs, None) + end


def read_logprobs(answer: bytes, *, stream: bool) -> Logprobs:
    """The log probabilities in a prefill engine's complete response; {} if it has none."""
    found: dict[int, bytes] = {}
    if stream:
        for event in _DATA.finditer(answer):
            number, elements = _logprobs_of(event[2], None)
            if elements:
                found[number] = elements
        return found
    for position, item in enumerate(_items(answer)):
        number, elements = _logprobs_of(item, position)
        if elements:
            found[number] = elements
    return found


def _items(answer: bytes) -> list[bytes]:
    text = answer.strip()
    if is_list(msgspec.Raw(text)):
        return [bytes(item) for item in read_elements(msgspec.Raw(text))]
    return [text]


def _logprobs_of(item: bytes, position: int | None) -> tuple[int, bytes]:
    """The index of the item's prompt, and the elements of its list as JSON."""
    try:
        outer = JsonText(item)
        inner = JsonText(outer.value(META))
        value = inner.value(LOGPROBS)
    except HttpError:
        return 0, b""
    number = _index(outer) if position is None else position
    return number, value.strip()[1:-1].strip() if value.startswith(b"[") else b""


def _index(event: JsonText) -> int:
    value = read_value(msgspec.Raw(event.value("index")))
    return value if isinstance(value, int) else 0


def _merged_batch(body: bytes, logprobs: Logprobs) -> bytes:
    text = body.strip()
    if not is_list(msgspec.Raw(text)):
        return _merged(body, logprobs, 0)
    parts, at = [], 0
    for position, item in enumerate(_items(text)):
        start = text.index(item, at)
        parts += [text[at:start], _merged(item, logprobs, position)]
        at = start + len(item)
    return b"".join([*parts, text[at:]])


def _merged(item: bytes, logprobs: Logprobs, position: int | None) -> bytes:
    """`position`: the index of its prompt; None: use its `index`."""
    try:
        outer = JsonText(item)
        number = _index(outer) if position is None else position
        before, meta = logprobs.get(number, b""), outer.value(META)
        if not before or not meta.startswith(b"{"):
            return item
        own = JsonText(meta).value(LOGPROBS)
        after = own.strip()[1:-1].strip() if own.startswith(b"[") else b""
        edits: Edits = {META: {LOGPROBS: b"[%b]" % b",".join(filter(None, (before, after)))}}
        return splice(item, edits)
    except HttpError:
        return item
