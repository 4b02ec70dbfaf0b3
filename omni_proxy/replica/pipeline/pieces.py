"""How much of a stage's result has gone out in pieces, and what is left of the whole.

Invariant: pieces plus rest is the whole result, each character, token and byte once.
"""

from __future__ import annotations

from typing import Any

GROWING = ("text", "token_ids", "output_token_logprobs", "audio_data")


class Sent:
    """Lengths of what one stage streamed for one request."""

    __slots__ = ("_lengths",)

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def note(self, chunk: dict[str, Any]) -> None:
        for key in GROWING:
            if piece := chunk.get(key):
                self._lengths[key] = self._lengths.get(key, 0) + len(piece)

    def rest(self, whole: dict[str, Any]) -> dict[str, Any]:
        """`whole` without what was streamed; keys that do not grow stay."""
        lengths = self._lengths
        return {
            key: value[lengths[key] :] if key in lengths and value else value
            for key, value in whole.items()
        }


def size_bytes(chunk: dict[str, Any]) -> int:
    """About what a waiting chunk holds in memory."""
    tokens = len(chunk.get("token_ids") or ()) + 3 * len(chunk.get("output_token_logprobs") or ())
    return 256 + len(chunk.get("text") or "") + len(chunk.get("audio_data") or b"") + 8 * tokens
