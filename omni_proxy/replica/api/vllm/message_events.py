"""Anthropic's message and its events, made of results and chunks. No I/O.

    message_start, content_block_start, content_block_delta*, content_block_stop, message_delta,
    message_stop
Invariant: an event stream has all of these in this order, or ends with an `error` event. A text
block is opened by the first text; an empty answer has none in a stream, and an empty one as a
whole, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from omni_proxy.replica.api.common.errors import ClientError, SpeechError, status_and_message
from omni_proxy.replica.api.vllm.vllm_errors import error_kind
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk

EVENT_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
}


def named_event(name: str, payload: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(payload))


def anthropic_error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def anthropic_message(message_id: str, model: str, result: CompletionResult) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": result.text}],
        "model": model,
    }
    reason, stop = stop_reason(result.finish_reason, result.extra.get("stop_hit"))
    ended = {"stop_reason": reason, "stop_sequence": stop}
    message |= {key: value for key, value in ended.items() if value is not None}
    return message | {"usage": anthropic_usage(result.usage)}


def stop_reason(finish_reason: str | None, hit: Any) -> tuple[str | None, str | None]:
    """None for a request that was aborted: Anthropic has no word for it."""
    if finish_reason == "length":
        return "max_tokens", None
    if finish_reason != "stop":
        return None, None
    return ("stop_sequence", hit) if isinstance(hit, str) else ("end_turn", None)


def anthropic_usage(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Input tokens are those that were not read from the prefix cache."""
    counts = usage or {}
    cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, (counts.get("prompt_tokens") or 0) - cached),
        "output_tokens": counts.get("completion_tokens") or 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


class MessageEvents:
    """The events of one streamed message (a `ChunkEncoder`)."""

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._started = False
        self._open = False

    def feed(self, chunk: GenerateChunk) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            yield self._start(chunk)
        if chunk.text:
            if not self._open:
                self._open = True
                block = {"type": "text", "text": ""}
                yield _event("content_block_start", content_block=block, index=0)
            delta = {"type": "text_delta", "text": chunk.text}
            yield _event("content_block_delta", delta=delta, index=0)
        if not chunk.terminal:
            return
        if self._open:
            yield _event("content_block_stop", index=0)
        reason, stop = stop_reason(chunk.finish_reason, chunk.extra.get("stop_hit"))
        ended = {"stop_reason": reason, "stop_sequence": stop}
        yield _event("message_delta", delta=ended, usage=anthropic_usage(chunk.usage))
        yield _event("message_stop")

    def failed(self, error: ClientError | SpeechError) -> bytes | None:
        if isinstance(error, SpeechError):
            return None
        status, message = status_and_message(error)
        return named_event("error", anthropic_error(error_kind(status), message))

    def _start(self, chunk: GenerateChunk) -> bytes:
        tokens = (chunk.usage or {}).get("prompt_tokens") or chunk.extra.get("prompt_tokens") or 0
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": tokens, "output_tokens": 0},
        }
        return _event("message_start", message=message)


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})
