"""OpenAI's response object and its events, with vLLM's keys.

    response.created, response.in_progress, response.output_item.added,
    response.content_part.added, response.output_text.delta*, response.output_text.done,
    response.content_part.done, response.output_item.done, response.completed
Invariant: `sequence_number` counts the events from 0; the texts of all deltas together are the text
of the response. A stream that cannot be finished ends with an `error` event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

from omni_proxy.replica.api.common.errors import ClientError, SpeechError, status_and_message
from omni_proxy.replica.api.common.sse import named_event
from omni_proxy.replica.api.vllm.vllm_errors import error_kind
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk

STATUSES = {"length": "incomplete", "abort": "cancelled"}
INCOMPLETE = {"reason": "max_output_tokens"}


def new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex[:16]}"


def response_object(body: dict[str, Any], response_id: str, model: str) -> dict[str, Any]:
    """The object of a response that has just begun; `body` is the request's, with defaults."""
    return {
        "id": response_id,
        "created_at": int(time.time()),
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": model,
        "object": "response",
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": _or(body.get("temperature"), 1.0),
        "tool_choice": "auto" if body.get("tools") else "none",
        "tools": body.get("tools") or [],
        "top_p": _or(body.get("top_p"), 1.0),
        "background": bool(body.get("background")),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "previous_response_id": body.get("previous_response_id"),
        "prompt": None,
        "reasoning": body.get("reasoning"),
        "service_tier": body.get("service_tier") or "auto",
        "status": "in_progress",
        "text": body.get("text"),
        "top_logprobs": None,
        "truncation": body.get("truncation") or "disabled",
        "usage": None,
        "user": body.get("user"),
        "presence_penalty": _or(body.get("presence_penalty"), 0.0),
        "frequency_penalty": _or(body.get("frequency_penalty"), 0.0),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def with_output(
    response: dict[str, Any], text: str, ended: CompletionResult | GenerateChunk, item_id: str
) -> dict[str, Any]:
    """The completed response."""
    status = STATUSES.get(ended.finish_reason or "", "completed")
    return response | {
        "incomplete_details": INCOMPLETE if status == "incomplete" else None,
        "output": [message_item(item_id, text)] if text else [],
        "status": status,
        "usage": response_usage(ended.usage),
    }


def message_item(item_id: str, text: str | None) -> dict[str, Any]:
    """The only output item; with `text` None, it has just begun."""
    return {
        "id": item_id,
        "content": [] if text is None else [text_part(text)],
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "type": "message",
        "phase": None,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def response_usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": completion,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + completion,
    }


class ResponseEvents:
    """The events of one streamed response (a `ChunkEncoder`).

    `finished` is called with the final response before its event is sent.
    """

    def __init__(
        self, response: dict[str, Any], finished: Callable[[dict[str, Any], str], None]
    ) -> None:
        self._response = response
        self._finished = finished
        self._item_id = new_id("msg")
        self._text: list[str] = []
        self._number = 0

    def feed(self, chunk: GenerateChunk) -> Iterator[bytes]:
        if not self._number:
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
        if chunk.text:
            if not self._text:
                yield from self._opened()
            self._text.append(chunk.text)
            yield self._event("response.output_text.delta", delta=chunk.text, logprobs=[],
                              **self._place())  # fmt: skip
        if chunk.terminal:
            text = "".join(self._text)
            if self._text:
                yield from self._closed(text)
            final = with_output(self._response, text, chunk, self._item_id)
            self._finished(final, text)
            yield self._event("response.completed", response=final)

    def failed(self, error: ClientError | SpeechError) -> bytes | None:
        if isinstance(error, SpeechError):
            return None
        status, message = status_and_message(error)
        return self._event("error", code=error_kind(status), message=message, param=None)

    def _opened(self) -> Iterator[bytes]:
        item = message_item(self._item_id, None)
        yield self._event("response.output_item.added", item=item, output_index=0)
        part = text_part("") | {"logprobs": []}
        yield self._event("response.content_part.added", part=part, **self._place())

    def _closed(self, text: str) -> Iterator[bytes]:
        yield self._event("response.output_text.done", text=text, logprobs=[], **self._place())
        yield self._event("response.content_part.done", part=text_part(text), **self._place())
        item = message_item(self._item_id, text)
        yield self._event("response.output_item.done", item=item, output_index=0)

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(name, fields | {"sequence_number": number, "type": name})
