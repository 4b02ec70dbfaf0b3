"""The answer of a decode engine as the client gets it: its own `rid`, and all log probabilities.

Two things of an answer are not the decode engine's to say: the id that the client gave, and the log
probabilities of the prompt, which the prefill engine computed; they go in front of its own.
Invariant: every other byte stays. What can't be read is passed on as it came. Source: features.md
2.1, 2.7.
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

Logprobs = Mapping[int, bytes]  # by the prompt's number: the elements of its list as JSON


def is_one_id(given: bytes) -> bool:
    """Whether this `rid` names the whole request. `given`: as JSON."""
    return given.startswith(b'"') and given != b'""'


class ClientIds:
    """Puts the client's ids in the place of ours. `given`: the client's `rid` as JSON."""

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
        number = int(found[1] or 0)  # without one it is no batch
        known = self._by_number[number] if number < len(self._by_number) else b""
        return known or found[0]


class ResponseRewriter:
    """Of one answer. `ids`: None if the client gave none; `logprobs`: those of prefill."""

    __slots__ = ("_ids", "_logprobs", "_rest")

    def __init__(self, ids: ClientIds | None, logprobs: Logprobs) -> None:
        self._ids = ids
        self._logprobs = logprobs
        self._rest = bytearray()

    def rewrite_body(self, body: bytes) -> bytes:
        """A whole answer that is no stream: an object, or a list of them for a batch."""
        if self._logprobs:
            body = _merged_batch(body, self._logprobs)
        return body if self._ids is None else self._ids.restore(body)

    def feed(self, payload: bytes) -> bytes:
        """The events that are complete with this piece of a stream. Raises
        UpstreamProtocolError past `MAX_EVENT_BYTES` without the end of an event."""
        rest = self._rest
        start = max(0, len(rest) - _BLANK_BYTES + 1)  # what is before has no end of an event
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
        """What came behind the last complete event, at the end of the stream."""
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
    """Of a prefill engine's whole answer; {} if it has none."""
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
    """The number of its prompt, and the elements of its list."""
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
    """`position`: the number of its prompt; None: that of its `index`."""
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
