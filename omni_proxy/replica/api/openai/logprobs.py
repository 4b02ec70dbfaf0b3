"""Log probabilities in OpenAI's two shapes: chat's items, and the four lists of completions. Pure.

Items of a stage are `[log probability, token id, spelling, likeliest]`, of which the last two may
be missing. A spelling is bytes, text, or a list with a control token's name.
Invariant: a token is told of as soon as its text is, and none whose text is never told: no model's
end, nothing behind a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.models.tokenizer import Utf8Stream
from omni_proxy.replica.pipeline.requests import RequestFailed

MAX_TOP_LOGPROBS = 20  # OpenAI's bound
MISSING = "this pipeline returns no log probabilities; send logprobs=false to go without"

Item = Sequence[Any]


def parse_top_logprobs(logprobs: bool | None, top: int | None) -> int | None:
    """How many likeliest tokens a chat tells of; None for no log probabilities at all.

    Raises DetailError 400.
    """
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise DetailError(400, f"top_logprobs must be within 0 and {MAX_TOP_LOGPROBS}, not {top}")
    if not logprobs:
        if top:
            raise DetailError(400, "top_logprobs needs logprobs: true")
        return None
    return top or 0


class LogprobAligner:
    """One answer's tokens, given out as their text is."""

    def __init__(self) -> None:
        self._waiting: deque[Item] = deque()
        self._ahead_bytes = 0  # of the text given out, beyond the tokens given out

    def feed(self, items: Sequence[Item] | None, text: str) -> list[Item]:
        """Take what a stage told, and the text that goes out now; return what goes with it."""
        self._waiting.extend(items or ())
        self._ahead_bytes += len(text.encode("utf-8", errors="replace"))
        told: list[Item] = []
        while self._waiting:
            size = _size(self._waiting[0])
            if size == 0:  # a control token stands for no text
                self._waiting.popleft()
                continue
            if size is not None and self._ahead_bytes <= 0:
                break
            told.append(self._waiting.popleft())
            self._ahead_bytes -= size or 0
        return told


def _size(item: Item) -> int | None:
    """Bytes of the token's text; None where nobody knows."""
    spelling = item[2] if len(item) > 2 else None
    if isinstance(spelling, list):
        return 0
    if isinstance(spelling, str):
        return len(spelling.encode("utf-8", errors="replace"))
    return None if spelling is None else len(spelling)


def require_logprobs(items: Sequence[Item] | None, wanted: bool) -> Sequence[Item] | None:
    """`items`. Raises RequestFailed 501 where they are wanted and there are none."""
    if items is None and wanted:
        raise RequestFailed(MISSING, 501)
    return items


def chat_logprobs(items: Sequence[Item]) -> dict[str, Any]:
    return {"content": [_chat_item(item) for item in items]}


def _chat_item(item: Item) -> dict[str, Any]:
    likeliest = item[3] if len(item) > 3 else ()
    return _chat_token(item) | {"top_logprobs": [_chat_token(each) for each in likeliest]}


def _chat_token(item: Item) -> dict[str, Any]:
    spelling = item[2] if len(item) > 2 else None
    spelled = spelling.encode() if isinstance(spelling, str) else spelling
    return {
        "token": _text(item, spelling),
        "logprob": item[0],
        "bytes": list(spelled) if isinstance(spelled, bytes) else None,
    }


def _text(item: Item, spelling: Any) -> str:
    if isinstance(spelling, bytes):
        return spelling.decode("utf-8", errors="replace")
    if isinstance(spelling, list):
        return str(spelling[0])
    return str(spelling or f"token_id:{item[1]}")


class CompletionLogprobs:
    """The four lists of one completion's choice, whole or piece by piece."""

    def __init__(self) -> None:
        self._characters = Utf8Stream()
        self._place = 0

    def feed(self, items: Sequence[Item] | None) -> dict[str, Any] | None:
        """The lists for the next tokens; no offsets where one of their texts is not known."""
        if not items:
            return None
        known = all(len(item) > 2 and item[2] is not None for item in items)
        return {
            "tokens": [_legacy(item) for item in items],
            "token_logprobs": [item[0] for item in items],
            "top_logprobs": _legacy_top(items),
            "text_offset": list(self._offsets(items)) if known else [],
        }

    def _offsets(self, items: Sequence[Item]) -> Iterator[int]:
        for item in items:
            yield self._place
            spelling = item[2]
            if isinstance(spelling, str):
                self._place += len(spelling)
            elif isinstance(spelling, bytes):
                self._place += len(self._characters.feed(spelling))


def _legacy_top(items: Sequence[Item]) -> list[dict[str, float]] | None:
    if not any(len(item) > 3 and item[3] for item in items):
        return None
    return [
        {_legacy(each): each[0] for each in (item[3] if len(item) > 3 else ())} for item in items
    ]


def _legacy(item: Item) -> str:
    """A token's name in OpenAI's older shape, where half a character is spelled in escapes."""
    spelling = item[2] if len(item) > 2 else None
    if isinstance(spelling, bytes):
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
    return _text(item, spelling)
