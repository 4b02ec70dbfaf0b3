"""Reads a streamed answer of an OpenAI-compatible server, in the pieces in which it arrives.

PURE. Invariant: equal bytes give equal events, however they are split. Comments (keep-alive) and
fields other than `data` are skipped. Source: HTML Standard, 9.2.6 (interpreting an event stream);
OpenAI's chunks of `/v1/chat/completions` and `/v1/completions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

DONE: Final = b"[DONE]"
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
MAX_TOKENS: Final = 2**53  # that a server is believed to have counted in one request
_BOM: Final = b"\xef\xbb\xbf"
# Fields of a chat delta that hold what the model generated.
_GENERATED: Final = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


class EventStreamError(Exception):
    """The stream can't be read, or holds an error of the server; the text says which."""


class EventStreamReader:
    """`feed` takes bytes and returns the data of the events that are complete with them.

    An event that no blank line ends is dropped, as the standard says.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # of the line that is not complete
        self._data: list[bytes] = []  # of the event that is not complete
        self._size = 0
        self._after_cr = False  # a LF that comes next belongs to it
        self._first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises EventStreamError."""
        if not chunk:
            return []
        ends_in_cr = chunk.endswith(b"\r")
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = ends_in_cr
        # bytes.splitlines: LF, CR and CRLF, and no other character.
        events: list[bytes] = []
        for piece in chunk.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            self._line += text
            self._size += len(text)
            if self._size > MAX_EVENT_BYTES:
                raise EventStreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")
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
    """What the server counted. `cached`: None if it does not say."""

    input: int
    output: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """One event. `text`: what was generated; `generated` is also true for calls of tools."""

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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None
