"""Log probabilities in OpenAI's two formats: chat items, and the four lists of completions. Pure.

An item of a stage is `[log probability, token id, text, top candidates]`; the last two may be
missing. The text is bytes, str, or a list with the name of a control token. Invariant: a token is
released when its text is sent. Tokens whose text is never sent (an end-of-text token, tokens after
a stop string) are never released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from omni_proxy.replica.api.common.errors import DetailError
from omni_proxy.replica.models.tokenizer import Utf8Stream
from omni_proxy.replica.pipeline.requests import RequestFailed

MAX_TOP_LOGPROBS = 20  # OpenAI's bound
MISSING = "this pipeline returns no log probabilities; send logprobs=false"

Item = Sequence[Any]


def parse_top_logprobs(logprobs: bool | None, top: int | None) -> int | None:
    """The number of top candidates per token in a chat response; None for no log probabilities.

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
    """Holds back the tokens of one response until their text is sent."""

    def __init__(self) -> None:
        self._pending: deque[Item] = deque()
        self._unmatched_bytes = 0  # bytes of text sent beyond that of the released tokens

    def feed(self, items: Sequence[Item] | None, text: str) -> list[Item]:
        """Add the stage's new items and the text sent now; return the items of that text."""
        self._pending.extend(items or ())
        self._unmatched_bytes += len(text.encode("utf-8", errors="replace"))
        released: list[Item] = []
        while self._pending:
            size = _size(self._pending[0])
            if size == 0:  # a control token has no text
                self._pending.popleft()
                continue
            if size is not None and self._unmatched_bytes <= 0:
                break
            released.append(self._pending.popleft())
            self._unmatched_bytes -= size or 0
        return released


def _size(item: Item) -> int | None:
    """Bytes of the token's text; None if unknown."""
    spelling = item[2] if len(item) > 2 else None
    if isinstance(spelling, list):
        return 0
    if isinstance(spelling, str):
        return len(spelling.encode("utf-8", errors="replace"))
    return None if spelling is None else len(spelling)


def require_logprobs(items: Sequence[Item] | None, needed: bool) -> Sequence[Item] | None:
    """Return `items`. Raises RequestFailed 501 if they are needed and missing."""
    if items is None and needed:
        raise RequestFailed(MISSING, 501)
    return items


def chat_logprobs(items: Sequence[Item]) -> dict[str, Any]:
    return {"content": [_chat_item(item) for item in items]}


def _chat_item(item: Item) -> dict[str, Any]:
    likeliest = item[3] if len(item) > 3 else ()
    return _chat_token(item) | {"top_logprobs": [_chat_token(candidate) for candidate in likeliest]}


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
    """The four lists of one choice of a completion, built from one or more parts."""

    def __init__(self) -> None:
        self._characters = Utf8Stream()
        self._offset = 0

    def feed(self, items: Sequence[Item] | None) -> dict[str, Any] | None:
        """The lists for the next tokens; without offsets if the text of a token is unknown."""
        if not items:
            return None
        all_known = all(len(item) > 2 and item[2] is not None for item in items)
        return {
            "tokens": [_legacy(item) for item in items],
            "token_logprobs": [item[0] for item in items],
            "top_logprobs": _legacy_top(items),
            "text_offset": list(self._offsets(items)) if all_known else [],
        }

    def _offsets(self, items: Sequence[Item]) -> Iterator[int]:
        for item in items:
            yield self._offset
            spelling = item[2]
            if isinstance(spelling, str):
                self._offset += len(spelling)
            elif isinstance(spelling, bytes):
                self._offset += len(self._characters.feed(spelling))


def _legacy_top(items: Sequence[Item]) -> list[dict[str, float]] | None:
    if not any(len(item) > 3 and item[3] for item in items):
        return None
    return [
        {_legacy(candidate): candidate[0] for candidate in (item[3] if len(item) > 3 else ())}
        for item in items
    ]


def _legacy(item: Item) -> str:
    """A token's name in OpenAI's older format; incomplete UTF-8 is written as escapes."""
    spelling = item[2] if len(item) > 2 else None
    if isinstance(spelling, bytes):
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
    return _text(item, spelling)
