"""The state of a speech session as the worker's text messages report it: done, error, failed audio.

Must not change or delay messages. Unreadable messages, and messages longer than any event of the
protocol, are ignored. Source: the events of `/v1/audio/speech/stream`.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_EVENT_BYTES = 65536

# With these the worker is well and the session was not (omni-router.md 12).
_APPLICATION_CODES = frozenset((1002, 1003, 1007, 1008, 1009, 1010, 1013))


def is_application_code(code: int) -> bool:
    return code in _APPLICATION_CODES or 3000 <= code <= 4999


class _Event(msgspec.Struct):
    type: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class SpeechEvents:
    """`done`: session.done has come; `error`: an error event; `failed_audio`: a failed sentence."""

    __slots__ = ("_parts", "_size", "done", "error", "failed_audio")

    def __init__(self) -> None:
        self.done = self.error = self.failed_audio = False
        self._parts: list[str] = []
        self._size = 0

    def feed(self, piece: str, *, finished: bool) -> None:
        """The next piece of a text message."""
        self._size += len(piece)
        if self._size <= MAX_EVENT_BYTES:
            self._parts.append(piece)
        if finished:
            if self._size <= MAX_EVENT_BYTES:
                self._read("".join(self._parts))
            self._parts.clear()
            self._size = 0

    def _read(self, text: str) -> None:
        try:
            event = _decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return
        if event.type == "session.done":
            self.done = True
        elif event.type == "error":
            self.error = True
        elif event.type == "audio.done" and event.error:
            self.failed_audio = True
