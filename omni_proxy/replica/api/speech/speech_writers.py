"""Streamed speech: the choice of the stream format, and the writers of the three formats.

Invariant: the response head waits for the first audio, so earlier failures are plain HTTP errors;
later failures are visible: an error event in the openai-sse format, a cut connection in the others,
never a clean end. Every sample is sent once: the pipeline client removes the samples that were
streamed from the terminal chunk. Source: note:api-server 1.4 and 7.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from omni_proxy.replica.api.common.errors import ClientError, SpeechError, speech_server_error
from omni_proxy.replica.api.common.media import encode_audio
from omni_proxy.replica.api.common.sse import CONTENT_TYPE, DONE, encode_event
from omni_proxy.replica.api.route_context import SpeechStreamFormat
from omni_proxy.replica.api.speech.speech_fields import MEDIA_TYPES, SpeechRequest
from omni_proxy.replica.api.speech.speech_service import (
    DEFAULT_SAMPLE_RATE,
    NO_AUDIO,
    engine_secs,
    to_speech_error,
)
from omni_proxy.replica.pipeline.client import GenerateChunk


@dataclass(frozen=True, slots=True)
class SpeechOutcome:
    """How a speech request ended."""

    finish_reason: str
    usage: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, finish_reason: str | None, usage: dict[str, Any] | None, extra: Any
    ) -> SpeechOutcome:
        """Keep the token counts and the engine time, if the pipeline reports them."""
        if usage is None:
            return cls(finish_reason or "unknown")
        counts = {name: usage.get(name) for name in _COUNTS}
        return cls(
            finish_reason or "unknown", counts | {"engine_time_s": engine_secs(usage, extra or {})}
        )


_COUNTS: Final = ("prompt_tokens", "completion_tokens", "total_tokens")


class SpeechWriter(Protocol):
    """One stream format: encodes audio, the end and a failure as bytes.

    `failed` returns None to cut the connection.
    """

    def headers(self, sample_rate: int) -> dict[str, str]: ...

    def audio(self, new: bytes, sample_rate: int) -> bytes: ...

    def end(self, outcome: SpeechOutcome) -> bytes: ...

    def failed(self, error: SpeechError) -> bytes | None: ...


def _audio_headers(request_id: str, sample_rate: int) -> dict[str, str]:
    return {
        "x-request-id": request_id,
        "x-sample-rate": str(sample_rate),
        "x-channels": "1",
        "x-bit-depth": "16",
    }


class ChunkEventWriter:
    """The sse format: `audio.speech.chunk` events, each with a complete file, then `[DONE]`."""

    def __init__(self, request: SpeechRequest, request_id: str) -> None:
        self._format = request.response_format
        self._request_id = request_id
        self._index = 0

    def headers(self, sample_rate: int) -> dict[str, str]:
        return {
            "content-type": CONTENT_TYPE,
            "cache-control": "no-cache",
            "x-request-id": self._request_id,
        }

    def _chunk(self, audio: dict[str, Any] | None, **rest: Any) -> dict[str, Any]:
        # The id has its prefix twice, as in other servers with this format.
        chunk = {
            "id": f"speech-{self._request_id}",
            "object": "audio.speech.chunk",
            "index": self._index,
            "audio": audio,
        }
        self._index += 1
        return chunk | rest

    def audio(self, new: bytes, sample_rate: int) -> bytes:
        encoded = encode_audio(new, sample_rate, self._format)
        audio = {
            "data": base64.b64encode(encoded).decode(),
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

    def failed(self, error: SpeechError) -> None:
        return None


class PcmWriter:
    """The pcm format: only int16 samples; their rate is in the response headers."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def headers(self, sample_rate: int) -> dict[str, str]:
        headers = _audio_headers(self._request_id, sample_rate)
        return headers | {
            "content-type": MEDIA_TYPES["pcm"],
            "x-sglang-omni-speech-id": self._request_id,
        }

    def audio(self, new: bytes, sample_rate: int) -> bytes:
        return encode_audio(new, sample_rate, "pcm")

    def end(self, outcome: SpeechOutcome) -> bytes:
        return b""

    def failed(self, error: SpeechError) -> None:
        return None


class DeltaEventWriter:
    """The openai-sse format: `speech.audio.delta` events, one `speech.audio.done`; no `[DONE]`."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def headers(self, sample_rate: int) -> dict[str, str]:
        headers = _audio_headers(self._request_id, sample_rate)
        return headers | {"content-type": CONTENT_TYPE, "cache-control": "no-cache"}

    def audio(self, new: bytes, sample_rate: int) -> bytes:
        samples = base64.b64encode(encode_audio(new, sample_rate, "pcm")).decode()
        return encode_event({"type": "speech.audio.delta", "audio": samples})

    def end(self, outcome: SpeechOutcome) -> bytes:
        usage = outcome.usage
        usage_body = None
        if usage is not None:
            usage_body = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
            }
        reason = "stop" if outcome.finish_reason == "unknown" else outcome.finish_reason
        return encode_event(
            {"type": "speech.audio.done", "usage": usage_body, "finish_reason": reason}
        )

    def failed(self, error: SpeechError) -> bytes:
        return encode_event({"type": "error", "error": error.error()})


def writer_for(
    stream_format: SpeechStreamFormat, request: SpeechRequest, request_id: str
) -> SpeechWriter:
    match stream_format:
        case "sse":
            return ChunkEventWriter(request, request_id)
        case "pcm":
            return PcmWriter(request_id)
        case "openai-sse":
            return DeltaEventWriter(request_id)


def choose_stream_format(
    request: SpeechRequest, stream_speech_as: SpeechStreamFormat
) -> SpeechStreamFormat | None:
    """Return the format of the stream, or None if it isn't streamed. Raises SpeechError.

    stream   stream_format   response
    false    absent, audio   no stream: one file
    true     absent          the server's default, `stream_speech_as`
    true     audio           pcm: int16 samples; needs response_format pcm
    any      sse             openai-sse: `speech.audio.delta` events of int16 samples, no `[DONE]`;
                             needs response_format pcm or none
    The third format, sse, is `audio.speech.chunk` events of complete files, then `[DONE]`.
    """
    stream_format: SpeechStreamFormat | None = None
    if request.stream_format == "sse":
        stream_format = "openai-sse"
    elif request.stream:
        stream_format = "pcm" if request.stream_format == "audio" else stream_speech_as
    response_format = request.response_format if request.format_given else None
    if stream_format == "pcm" and response_format != "pcm":
        raise SpeechError(
            'a stream of raw audio needs response_format="pcm" (or set stream_format="sse")',
            "response_format",
        )
    if stream_format == "openai-sse" and response_format not in (None, "pcm"):
        raise SpeechError(
            'stream_format="sse" has 16-bit samples: response_format must be "pcm" or absent',
            "response_format",
        )
    return stream_format


class SampleRateGuard:
    """The sample rate of one request's audio, set by its first chunk."""

    def __init__(self) -> None:
        self.rate = 0

    def check(self, chunk: GenerateChunk) -> int:
        """Return the rate of a chunk with audio.

        Raises SpeechError if it changes, because the response head has the first rate.
        """
        rate = chunk.sample_rate or DEFAULT_SAMPLE_RATE
        if self.rate not in (0, rate):
            raise speech_server_error(f"the sample rate changed from {self.rate} to {rate} Hz")
        self.rate = rate
        return rate


class SpeechEncoder:
    """Encodes a generation's chunks in one format.

    `ended` is called with the outcome, only after a clean end.
    """

    def __init__(self, writer: SpeechWriter, ended: Callable[[SpeechOutcome], None]) -> None:
        self._writer = writer
        self._ended = ended
        self._rate = SampleRateGuard()

    def headers(self) -> dict[str, str]:
        return self._writer.headers(self._rate.rate)

    def feed(self, chunk: GenerateChunk) -> list[bytes]:
        """Raises SpeechError for audio of another rate, and for an end without any audio."""
        parts = []
        if chunk.audio:
            parts.append(self._writer.audio(chunk.audio, self._rate.check(chunk)))
        if chunk.terminal:
            if not self._rate.rate:
                raise speech_server_error(NO_AUDIO)
            outcome = SpeechOutcome.of(chunk.finish_reason, chunk.usage, chunk.extra)
            self._ended(outcome)
            parts.append(self._writer.end(outcome))
        return parts

    def failed(self, error: ClientError | SpeechError) -> bytes | None:
        return self._writer.failed(to_speech_error(error))
