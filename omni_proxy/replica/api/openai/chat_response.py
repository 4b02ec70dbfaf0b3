"""Chat responses made of chunks and results, in the formats of api-server.md 1.3. No I/O.

Invariant: keys without a value are left out, except `finish_reason`; the finish event comes last
and alone carries `usage` (with several choices, the last finish event of all); text and audio never
share a delta; no text after a stop string is sent.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.common.sse import Event
from omni_proxy.replica.api.openai.logprobs import LogprobAligner, chat_logprobs, require_logprobs
from omni_proxy.replica.api.openai.multi_generation import openai_usage, total_usage
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk
from omni_proxy.replica.text.stop_strings import StopStrings


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return `text` up to the first occurrence of the first stop string, in request order, in
    it."""
    for stop in stops:
        index = text.find(stop)
        if index >= 0:
            return text[:index]
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponseOptions:
    """Request fields that the format of the response depends on."""

    request_id: str
    model: str
    modalities: tuple[str, ...] = ("text",)
    audio_format: str = "wav"
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    created_unix_secs: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created_unix_secs,
            "model": self.model,
        }

    def audio(self, audio: bytes | None, rate: int) -> dict[str, Any] | None:
        """The audio object, if audio was requested and generated; else None."""
        if "audio" not in self.modalities or not audio:
            return None
        encoded = encode_audio(audio, rate, self.audio_format)
        data = base64.b64encode(encoded).decode("ascii")
        return {"id": f"audio-{self.request_id}", "data": data}


def chat_completion(
    options: ChatResponseOptions, results: Sequence[CompletionResult]
) -> dict[str, Any]:
    """The body of a response that is not streamed, with one choice for each result.

    Raises RequestFailed 501 if log probabilities were requested and are missing.
    """
    choices = [_choice(options, index, result) for index, result in enumerate(results)]
    usages = [result.usage for result in results]
    usage = openai_usage(usages[0]) if len(usages) == 1 else total_usage(usages, len(usages))
    return options.head("chat.completion") | {"choices": choices, "usage": usage}


def _choice(options: ChatResponseOptions, index: int, result: CompletionResult) -> dict[str, Any]:
    text = truncate_at_stop(result.text, options.stops)
    message: dict[str, Any] = {"role": "assistant"}
    audio = options.audio(result.audio, result.sample_rate)
    if ("text" in options.modalities and text) or audio is None:
        message["content"] = text
    if audio is not None:
        message["audio"] = audio | {"transcript": text or None}
    choice: dict[str, Any] = {"index": index, "message": message}
    if options.logprobs:
        items = require_logprobs(result.logprobs, bool(text))
        choice["logprobs"] = chat_logprobs(LogprobAligner().feed(items, text))
    return choice | {"finish_reason": result.finish_reason or "stop"}


class ChatChunkFormatter:
    """The events of one streamed response.

    `ids` are the request ids whose chunks arrive, one for each choice in order.
    """

    def __init__(self, options: ChatResponseOptions, ids: Sequence[str]) -> None:
        self._options = options
        self._choices = {
            choice_id: _ChoiceFormatter(options, index) for index, choice_id in enumerate(ids)
        }
        self._usages: dict[str, dict[str, Any] | None] = {}

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        """Raises RequestFailed 501 if log probabilities were requested and are missing."""
        for choice in self._choices[chunk.request_id].feed(chunk):
            yield (
                self._options.head("chat.completion.chunk")
                | {"choices": [choice]}
                | (self._usage(chunk) if choice["finish_reason"] else {})
            )

    def _usage(self, chunk: GenerateChunk) -> dict[str, Any]:
        """The total usage with the last finish event of all choices; empty before."""
        self._usages[chunk.request_id] = chunk.usage
        if len(self._usages) < len(self._choices):
            return {}
        usages = [self._usages[choice_id] for choice_id in self._choices]
        usage = openai_usage(usages[0]) if len(usages) == 1 else total_usage(usages, len(usages))
        return {} if usage is None else {"usage": usage}


class _ChoiceFormatter:
    """The `choices` items of one choice."""

    def __init__(self, options: ChatResponseOptions, index: int) -> None:
        self._options = options
        self._index = index
        self._stops = StopStrings(options.stops)
        self._aligner = LogprobAligner()
        self._role_sent = False

    def feed(self, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        payloads = list(self._payloads(chunk))
        for payload, logprobs in payloads:
            yield self._delta(payload, logprobs)
        if chunk.terminal:
            yield self._choice({}, chunk.finish_reason or "stop")
        elif not payloads and not self._role_sent:
            yield self._delta({}, None)

    def _payloads(self, chunk: GenerateChunk) -> Iterator[tuple[dict[str, Any], Any]]:
        if "text" in self._options.modalities:
            text = self._stops.feed(chunk.text)
            if chunk.terminal:
                text += self._stops.flush()
            logprobs = self._logprobs(chunk, text)
            if text or logprobs:
                yield {"content": text}, logprobs
        audio = self._options.audio(chunk.audio, chunk.sample_rate)
        if audio is not None:
            yield {"audio": audio}, None

    def _logprobs(self, chunk: GenerateChunk, text: str) -> dict[str, Any] | None:
        if not self._options.logprobs:
            return None
        items = self._aligner.feed(require_logprobs(chunk.logprobs, bool(chunk.text)), text)
        return chat_logprobs(items) if items else None

    def _delta(self, payload: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        role = {} if self._role_sent else {"role": "assistant"}
        self._role_sent = True
        return self._choice(role | payload, None, logprobs)

    def _choice(
        self, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        optional = {} if logprobs is None else {"logprobs": logprobs}
        return {"index": self._index, "delta": delta} | optional | {"finish_reason": finish_reason}
