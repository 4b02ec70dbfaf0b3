"""Incremental parser of a streamed response of an OpenAI-compatible server.

Pure. Invariant: equal bytes give equal events, however they are split. Comments (keep-alive) and
fields other than `data` are skipped. Source: HTML Standard, 9.2.6 (interpreting an event stream);
OpenAI's chunks of `/v1/chat/completions` and `/v1/completions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.wire.bounded_json import MAX_INTEGER

DONE: Final = b"[DONE]"
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"
# Fields of a chat delta with generated output.
_GENERATED: Final = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


class EventStreamError(Exception):
    """The stream is invalid, or contains an error event of the server; see the message."""


class EventStreamReader:
    """Pass received bytes to `feed`, which returns the data of each event that they complete.

    An event that is not followed by a blank line is dropped, as the standard requires.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()  # the incomplete line
        self._data: list[bytes] = []  # data lines of the incomplete event
        self._size = 0
        self._after_cr = False  # the last byte was CR: a following LF is part of that line end
        self._first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises EventStreamError."""
        if not chunk:
            return []
        ends_in_cr = chunk.endswith(b"\r")
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = ends_in_cr
        # bytes.splitlines splits only at LF, CR and CRLF.
        events: list[bytes] = []
        for piece in chunk.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            self._line += text
            self._size += len(text)
            if self._size > self._max_event_bytes:
                raise EventStreamError(f"an event of more than {self._max_event_bytes} bytes")
            if len(text) < len(piece):
                self._end_line(events)
        return events

    def _end_line(self, events: list[bytes]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            line, self._first = line.removeprefix(_BOM), False
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data, self._size = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        else:
            self._size -= len(line)


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts reported by the server. `cached`: None if it does not report it."""

    input: int
    output: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """One event. `text`: the generated text. `generated`: the event has text or a tool call."""

    text: str = ""
    generated: bool = False
    finished: bool = False
    usage: TokenUsage | None = None


_decode: Final = msgspec.json.Decoder().decode


def read_chunk(data: bytes) -> AnswerChunk:
    """Raises EventStreamError."""
    if data.strip() in (b"", DONE):
        return AnswerChunk(finished=bool(data.strip()))
    try:
        event = _decode(data)
    except MALFORMED:
        raise EventStreamError("an event is not JSON") from None
    if not isinstance(event, dict):
        raise EventStreamError("an event is no JSON object")
    if event.get("error"):
        raise EventStreamError(f"error in the stream: {_message(event['error'])}")
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    usage = _usage(event.get("usage"))
    if not isinstance(choice, dict):
        return AnswerChunk(usage=usage)
    delta = choice.get("delta")
    parts = [choice.get("text")]
    if isinstance(delta, dict):
        parts += [delta.get(name) for name in _GENERATED]
    text = next((part for part in parts if isinstance(part, str) and part), "")
    return AnswerChunk(text, any(parts), choice.get("finish_reason") is not None, usage)


def _message(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:200]


def _usage(found: object) -> TokenUsage | None:
    if not isinstance(found, dict):
        return None
    prompt, answer = _count(found, "prompt_tokens"), _count(found, "completion_tokens")
    if prompt is None or answer is None:
        return None
    details = found.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(prompt, answer, cached)


def _count(found: dict[str, object], name: str) -> int | None:
    value = found.get(name)
    return value if type(value) is int and 0 <= value <= MAX_INTEGER else None
