"""Chat answers out of chunks and results: the shapes of api-server.md 1.3, and no I/O.

Invariant: keys without a value are left out, save `finish_reason`; the finish event comes last and
alone carries `usage`; text and audio never share a delta; nothing behind a stop string gets out.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_proxy.replica.api.speaking import encode
from omni_proxy.replica.api.sse import Event
from omni_proxy.replica.pipeline.requests import CompletionResult, GenerateChunk
from omni_proxy.replica.text.stops import StopStrings

USAGE_KEYS = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")


def usage_of(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """The OpenAI keys of a pipeline's usage; None is not known."""
    if usage is None:
        return None
    told = {key: usage[key] for key in USAGE_KEYS if usage.get(key) is not None}
    if "total_tokens" not in told and {"prompt_tokens", "completion_tokens"} <= told.keys():
        told["total_tokens"] = told["prompt_tokens"] + told["completion_tokens"]
    return told


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first place of the first stop string, in request order, that is in it."""
    for stop in stops:
        place = text.find(stop)
        if place >= 0:
            return text[:place]
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk:
    """What an answer's shape depends on."""

    request_id: str
    model: str
    modalities: tuple[str, ...] = ("text",)
    audio_format: str = "wav"
    stops: tuple[str, ...] = ()
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
        whole = encode(audio, rate, self.audio_format)
        data = base64.b64encode(whole).decode("ascii")
        return {"id": f"audio-{self.request_id}", "data": data}


def completion(ask: ChatAsk, result: CompletionResult) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    text = cut_at_stop(result.text, ask.stops)
    message: dict[str, Any] = {"role": "assistant"}
    audio = ask.audio(result.audio, result.sample_rate)
    if ("text" in ask.modalities and text) or audio is None:
        message["content"] = text
    if audio is not None:
        message["audio"] = audio | {"transcript": text or None}
    choice = {"index": 0, "message": message, "finish_reason": result.finish_reason or "stop"}
    return ask.head("chat.completion") | {"choices": [choice], "usage": usage_of(result.usage)}


class ChatDeltas:
    """One streamed answer's state: which events a chunk becomes."""

    def __init__(self, ask: ChatAsk) -> None:
        self._ask = ask
        self._stops = StopStrings(ask.stops)
        self._began = False

    def feed(self, chunk: GenerateChunk) -> Iterator[Event]:
        payloads = list(self._payloads(chunk))
        for payload in payloads:
            yield self._delta(payload)
        if chunk.terminal:
            yield self._finish(chunk)
        elif not payloads and not self._began:
            yield self._delta({})

    def _payloads(self, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        if "text" in self._ask.modalities:
            text = self._stops.feed(chunk.text)
            if chunk.terminal:
                text += self._stops.flush()
            if text:
                yield {"content": text}
        audio = self._ask.audio(chunk.audio, chunk.sample_rate)
        if audio is not None:
            yield {"audio": audio}

    def _delta(self, payload: dict[str, Any]) -> Event:
        role = {} if self._began else {"role": "assistant"}
        self._began = True
        return self._event(role | payload, None)

    def _event(self, delta: dict[str, Any], finish_reason: str | None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return self._ask.head("chat.completion.chunk") | {"choices": [choice]}

    def _finish(self, chunk: GenerateChunk) -> Event:
        finish = self._event({}, chunk.finish_reason or "stop")
        usage = usage_of(chunk.usage)
        return finish if usage is None else finish | {"usage": usage}
