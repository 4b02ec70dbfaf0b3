"""Chat answers out of chunks and results: the shapes of api-server.md 1.3, and no I/O.

Invariant: keys without a value are left out, save `finish_reason`; the finish event comes last and
alone carries `usage` (of several choices the very last one's); text and audio never share a delta;
nothing behind a stop string gets out.
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
    """`text` up to the first place of the first stop string, in request order, that is in it."""
    for stop in stops:
        place = text.find(stop)
        if place >= 0:
            return text[:place]
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponseOptions:
    """What an answer's shape depends on."""

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
        """The audio object of what was asked for and made; None is no audio."""
        if "audio" not in self.modalities or not audio:
            return None
        whole = encode_audio(audio, rate, self.audio_format)
        data = base64.b64encode(whole).decode("ascii")
        return {"id": f"audio-{self.request_id}", "data": data}


def chat_completion(
    ask: ChatResponseOptions, results: Sequence[CompletionResult]
) -> dict[str, Any]:
    """The body of an answer that is not streamed; several results are several choices.

    Raises RequestFailed 501 where log probabilities were asked for and are not there.
    """
    choices = [_choice(ask, index, result) for index, result in enumerate(results)]
    usages = [result.usage for result in results]
    usage = openai_usage(usages[0]) if len(usages) == 1 else total_usage(usages, len(usages))
    return ask.head("chat.completion") | {"choices": choices, "usage": usage}


def _choice(ask: ChatResponseOptions, index: int, result: CompletionResult) -> dict[str, Any]:
    text = truncate_at_stop(result.text, ask.stops)
    message: dict[str, Any] = {"role": "assistant"}
    audio = ask.audio(result.audio, result.sample_rate)
    if ("text" in ask.modalities and text) or audio is None:
        message["content"] = text
    if audio is not None:
        message["audio"] = audio | {"transcript": text or None}
    choice: dict[str, Any] = {"index": index, "message": message}
    if ask.logprobs:
        items = require_logprobs(result.logprobs, bool(text))
        choice["logprobs"] = chat_logprobs(LogprobAligner().feed(items, text))
    return choice | {"finish_reason": result.finish_reason or "stop"}


class ChatChunkFormatter:
    """One streamed answer's state: which events a chunk becomes.

    `ids` are those of the requests whose chunks come, one for each choice in its order.
    """

    def __init__(self, ask: ChatResponseOptions, ids: Sequence[str]) -> None:
        self._ask = ask
        self._choices = {each: _ChoiceFormatter(ask, index) for index, each in enumerate(ids)}
        self._usages: dict[str, dict[str, Any] | None] = {}

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        """Raises RequestFailed 501 where log probabilities were asked for and are not there."""
        for choice in self._choices[chunk.request_id].feed(chunk):
            yield (
                self._ask.head("chat.completion.chunk")
                | {"choices": [choice]}
                | (self._usage(chunk) if choice["finish_reason"] else {})
            )

    def _usage(self, chunk: GenerateChunk) -> dict[str, Any]:
        """What the last of all finish events tells; nothing with the others."""
        self._usages[chunk.request_id] = chunk.usage
        if len(self._usages) < len(self._choices):
            return {}
        usages = [self._usages[each] for each in self._choices]
        usage = openai_usage(usages[0]) if len(usages) == 1 else total_usage(usages, len(usages))
        return {} if usage is None else {"usage": usage}


class _ChoiceFormatter:
    """The same of one choice, which is all that its events have of their own."""

    def __init__(self, ask: ChatResponseOptions, index: int) -> None:
        self._ask = ask
        self._index = index
        self._stops = StopStrings(ask.stops)
        self._told = LogprobAligner()
        self._began = False

    def feed(self, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        payloads = list(self._payloads(chunk))
        for payload, logprobs in payloads:
            yield self._delta(payload, logprobs)
        if chunk.terminal:
            yield self._choice({}, chunk.finish_reason or "stop")
        elif not payloads and not self._began:
            yield self._delta({}, None)

    def _payloads(self, chunk: GenerateChunk) -> Iterator[tuple[dict[str, Any], Any]]:
        if "text" in self._ask.modalities:
            text = self._stops.feed(chunk.text)
            if chunk.terminal:
                text += self._stops.flush()
            told = self._logprobs(chunk, text)
            if text or told:
                yield {"content": text}, told
        audio = self._ask.audio(chunk.audio, chunk.sample_rate)
        if audio is not None:
            yield {"audio": audio}, None

    def _logprobs(self, chunk: GenerateChunk, text: str) -> dict[str, Any] | None:
        if not self._ask.logprobs:
            return None
        items = self._told.feed(require_logprobs(chunk.logprobs, bool(chunk.text)), text)
        return chat_logprobs(items) if items else None

    def _delta(self, payload: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        role = {} if self._began else {"role": "assistant"}
        self._began = True
        return self._choice(role | payload, None, logprobs)

    def _choice(
        self, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        told = {} if logprobs is None else {"logprobs": logprobs}
        return {"index": self._index, "delta": delta} | told | {"finish_reason": finish_reason}
