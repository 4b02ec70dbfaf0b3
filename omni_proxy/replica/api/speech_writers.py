"""The three forms in which streamed speech is written (api-server.md 1.4).

Invariant: a writer keeps no audio; what it returns goes out as it is. A failure that a form cannot
tell is told by cutting the connection, never by a clean end.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from omni_proxy.replica.api.envelope import SpeechRefusal
from omni_proxy.replica.api.speaking import encode, engine_secs
from omni_proxy.replica.api.speech_fields import MEDIA_TYPES, SpeechAsk
from omni_proxy.replica.api.sse import CONTENT_TYPE, DONE, event

Form = Literal["sse", "pcm", "openai-sse"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a spoken request ended."""

    finish_reason: str
    usage: dict[str, Any] | None = None

    @classmethod
    def of(cls, finish_reason: str | None, usage: dict[str, Any] | None, extra: Any) -> Outcome:
        """Keep the token counts and the engine's time, where the pipeline told any."""
        if usage is None:
            return cls(finish_reason or "unknown")
        kept = {name: usage.get(name) for name in _COUNTS}
        return cls(
            finish_reason or "unknown", kept | {"engine_time_s": engine_secs(usage, extra or {})}
        )


_COUNTS: Final = ("prompt_tokens", "completion_tokens", "total_tokens")


class Writer(Protocol):
    """One form: how audio, the end and a failure are written. `failed` None is: cut."""

    def headers(self, sample_rate: int) -> dict[str, str]: ...

    def audio(self, new: bytes, sample_rate: int) -> bytes: ...

    def end(self, outcome: Outcome) -> bytes: ...

    def failed(self, refusal: SpeechRefusal) -> bytes | None: ...


def _audio_headers(request_id: str, sample_rate: int) -> dict[str, str]:
    return {
        "x-request-id": request_id,
        "x-sample-rate": str(sample_rate),
        "x-channels": "1",
        "x-bit-depth": "16",
    }


class ChunkEvents:
    """`audio.speech.chunk` events, each with a whole file, then the end and `[DONE]`."""

    def __init__(self, ask: SpeechAsk, request_id: str) -> None:
        self._format = ask.response_format
        self._request_id = request_id
        self._index = 0

    def headers(self, sample_rate: int) -> dict[str, str]:
        return {
            "content-type": CONTENT_TYPE,
            "cache-control": "no-cache",
            "x-request-id": self._request_id,
        }

    def _chunk(self, audio: dict[str, Any] | None, **rest: Any) -> dict[str, Any]:
        # The id is told with its prefix twice, as the first servers of this form did.
        chunk = {
            "id": f"speech-{self._request_id}",
            "object": "audio.speech.chunk",
            "index": self._index,
            "audio": audio,
        }
        self._index += 1
        return chunk | rest

    def audio(self, new: bytes, sample_rate: int) -> bytes:
        whole = encode(new, sample_rate, self._format)
        audio = {
            "data": base64.b64encode(whole).decode(),
            "format": self._format,
            "mime_type": MEDIA_TYPES[self._format],
            "sample_rate": sample_rate,
        }
        return event(self._chunk(audio, finish_reason=None))

    def end(self, outcome: Outcome) -> bytes:
        usage = outcome.usage
        if usage is not None and usage["engine_time_s"] is None:
            usage = {name: usage[name] for name in _COUNTS}
        reason = "stop" if outcome.finish_reason == "unknown" else outcome.finish_reason
        last = self._chunk(None, finish_reason=reason, usage=usage)
        return event(last) + DONE

    def failed(self, refusal: SpeechRefusal) -> None:
        return None


class RawSamples:
    """Nothing but int16 samples; what they are stands in the head."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def headers(self, sample_rate: int) -> dict[str, str]:
        told = _audio_headers(self._request_id, sample_rate)
        return told | {
            "content-type": MEDIA_TYPES["pcm"],
            "x-sglang-omni-speech-id": self._request_id,
        }

    def audio(self, new: bytes, sample_rate: int) -> bytes:
        return encode(new, sample_rate, "pcm")

    def end(self, outcome: Outcome) -> bytes:
        return b""

    def failed(self, refusal: SpeechRefusal) -> None:
        return None


class DeltaEvents:
    """OpenAI's `speech.audio.delta` events and one `speech.audio.done`; no `[DONE]`."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def headers(self, sample_rate: int) -> dict[str, str]:
        told = _audio_headers(self._request_id, sample_rate)
        return told | {"content-type": CONTENT_TYPE, "cache-control": "no-cache"}

    def audio(self, new: bytes, sample_rate: int) -> bytes:
        samples = base64.b64encode(encode(new, sample_rate, "pcm")).decode()
        return event({"type": "speech.audio.delta", "audio": samples})

    def end(self, outcome: Outcome) -> bytes:
        usage = outcome.usage
        told = None
        if usage is not None:
            told = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
            }
        reason = "stop" if outcome.finish_reason == "unknown" else outcome.finish_reason
        return event({"type": "speech.audio.done", "usage": told, "finish_reason": reason})

    def failed(self, refusal: SpeechRefusal) -> bytes:
        return event({"type": "error", "error": refusal.error()})


def writer_for(form: Form, ask: SpeechAsk, request_id: str) -> Writer:
    match form:
        case "sse":
            return ChunkEvents(ask, request_id)
        case "pcm":
            return RawSamples(request_id)
        case "openai-sse":
            return DeltaEvents(request_id)
