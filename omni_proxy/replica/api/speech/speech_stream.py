"""Speech while it is spoken: which form a request gets, and what a generation is in that form.

Invariant: the head waits for the first audio, so what fails before it is a plain HTTP error; what
fails after it is seen: an error event in the openai-sse form, a cut connection in the others. Every
sample is sent once: the client has cut from the terminal chunk what was streamed before it.
Source: api-server.md 1.4 and 7.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from omni_proxy.replica.api.common.errors import ClientError, SpeechError, speech_server_error
from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.common.sse import CONTENT_TYPE, DONE, encode_event
from omni_proxy.replica.api.speech.speech_fields import MEDIA_TYPES, SpeechRequest
from omni_proxy.replica.api.speech.speech_service import (
    DEFAULT_SAMPLE_RATE,
    NO_AUDIO,
    engine_secs,
    to_speech_error,
)
from omni_proxy.replica.pipeline.client import GenerateChunk

StreamFormat = Literal["sse", "pcm", "openai-sse"]


@dataclass(frozen=True, slots=True)
class SpeechOutcome:
    """How a spoken request ended."""

    finish_reason: str
    usage: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, finish_reason: str | None, usage: dict[str, Any] | None, extra: Any
    ) -> SpeechOutcome:
        """Keep the token counts and the engine's time, where the pipeline told any."""
        if usage is None:
            return cls(finish_reason or "unknown")
        kept = {name: usage.get(name) for name in _COUNTS}
        return cls(
            finish_reason or "unknown", kept | {"engine_time_s": engine_secs(usage, extra or {})}
        )


_COUNTS: Final = ("prompt_tokens", "completion_tokens", "total_tokens")


class SpeechWriter(Protocol):
    """One form: how audio, the end and a failure are written. `failed` None is: cut."""

    def headers(self, sample_rate: int) -> dict[str, str]: ...

    def audio(self, new: bytes, sample_rate: int) -> bytes: ...

    def end(self, outcome: SpeechOutcome) -> bytes: ...

    def failed(self, refusal: SpeechError) -> bytes | None: ...


def _audio_headers(request_id: str, sample_rate: int) -> dict[str, str]:
    return {
        "x-request-id": request_id,
        "x-sample-rate": str(sample_rate),
        "x-channels": "1",
        "x-bit-depth": "16",
    }


class ChunkEventWriter:
    """`audio.speech.chunk` events, each with a whole file, then the end and `[DONE]`."""

    def __init__(self, ask: SpeechRequest, request_id: str) -> None:
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
        whole = encode_audio(new, sample_rate, self._format)
        audio = {
            "data": base64.b64encode(whole).decode(),
            "format": self._format,
            "mime_type": MEDIA_TYPES[self._format],
            "sample_rate": sample_rate,
        }
        return encode_event(self._chunk(audio, finish_reason=None))

    def end(self, outcome: SpeechOutcome) -> bytes:
        usage = outcome.usage
        if usage is not None and usage["engine_time_s"] is None:
            usage = {name: usage[name] for name in _COUNTS}
        reason = "stop" if outcome.finish_reason == "unknown" else outcome.finish_reason
        last = self._chunk(None, finish_reason=reason, usage=usage)
        return encode_event(last) + DONE

    def failed(self, refusal: SpeechError) -> None:
        return None


class PcmWriter:
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
        return encode_audio(new, sample_rate, "pcm")

    def end(self, outcome: SpeechOutcome) -> bytes:
        return b""

    def failed(self, refusal: SpeechError) -> None:
        return None


class DeltaEventWriter:
    """OpenAI's `speech.audio.delta` events and one `speech.audio.done`; no `[DONE]`."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def headers(self, sample_rate: int) -> dict[str, str]:
        told = _audio_headers(self._request_id, sample_rate)
        return told | {"content-type": CONTENT_TYPE, "cache-control": "no-cache"}

    def audio(self, new: bytes, sample_rate: int) -> bytes:
        samples = base64.b64encode(encode_audio(new, sample_rate, "pcm")).decode()
        return encode_event({"type": "speech.audio.delta", "audio": samples})

    def end(self, outcome: SpeechOutcome) -> bytes:
        usage = outcome.usage
        told = None
        if usage is not None:
            told = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
            }
        reason = "stop" if outcome.finish_reason == "unknown" else outcome.finish_reason
        return encode_event({"type": "speech.audio.done", "usage": told, "finish_reason": reason})

    def failed(self, refusal: SpeechError) -> bytes:
        return encode_event({"type": "error", "error": refusal.error()})


def writer_for(form: StreamFormat, ask: SpeechRequest, request_id: str) -> SpeechWriter:
    match form:
        case "sse":
            return ChunkEventWriter(ask, request_id)
        case "pcm":
            return PcmWriter(request_id)
        case "openai-sse":
            return DeltaEventWriter(request_id)


def choose_stream_format(ask: SpeechRequest, stream_speech_as: StreamFormat) -> StreamFormat | None:
    """Return the form of the answer; None is no stream. Raises SpeechError.

    stream   stream_format   answer
    false    absent, audio   no stream: one file
    true     absent          the server's own form, `stream_speech_as`
    true     audio           pcm: int16 samples; wants response_format pcm
    any      sse             openai-sse: `speech.audio.delta` events of int16 samples, no `[DONE]`;
                             wants response_format pcm or none
    The third form, sse, is `audio.speech.chunk` events of whole files, then `[DONE]`.
    """
    form: StreamFormat | None = None
    if ask.stream_format == "sse":
        form = "openai-sse"
    elif ask.stream:
        form = "pcm" if ask.stream_format == "audio" else stream_speech_as
    chosen = ask.response_format if ask.format_given else None
    if form == "pcm" and chosen != "pcm":
        raise SpeechError(
            'a stream of raw audio needs response_format="pcm" (or ask for stream_format="sse")',
            "response_format",
        )
    if form == "openai-sse" and chosen not in (None, "pcm"):
        raise SpeechError(
            'stream_format="sse" carries 16-bit samples: response_format must be "pcm" or absent',
            "response_format",
        )
    return form


class SampleRateGuard:
    """The sample rate of one request's audio, which its first piece sets."""

    def __init__(self) -> None:
        self.rate = 0

    def hold(self, chunk: GenerateChunk) -> int:
        """Return the rate of a chunk with audio.

        Raises SpeechError where it changes: what was sent before has announced another.
        """
        rate = chunk.sample_rate or DEFAULT_SAMPLE_RATE
        if self.rate not in (0, rate):
            raise speech_server_error(f"the sample rate changed from {self.rate} to {rate} Hz")
        self.rate = rate
        return rate


class SpeechEncoder:
    """What a generation's chunks are in one form; `ended` hears the outcome of a clean end."""

    def __init__(self, writer: SpeechWriter, ended: Callable[[SpeechOutcome], None]) -> None:
        self._writer = writer
        self._ended = ended
        self._rate = SampleRateGuard()

    def headers(self) -> dict[str, str]:
        return self._writer.headers(self._rate.rate)

    def feed(self, chunk: GenerateChunk) -> list[bytes]:
        """Raises SpeechError for audio of another rate, and for an end without any."""
        pieces = []
        if chunk.audio:
            pieces.append(self._writer.audio(chunk.audio, self._rate.hold(chunk)))
        if chunk.terminal:
            if not self._rate.rate:
                raise speech_server_error(NO_AUDIO)
            outcome = SpeechOutcome.of(chunk.finish_reason, chunk.usage, chunk.extra)
            self._ended(outcome)
            pieces.append(self._writer.end(outcome))
        return pieces

    def failed(self, fault: ClientError | SpeechError) -> bytes | None:
        return self._writer.failed(to_speech_error(fault))
