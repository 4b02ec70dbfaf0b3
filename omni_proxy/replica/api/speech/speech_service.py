"""The service behind all speech routes: checks, reference audio, and synthesis by the pipeline.

Invariant: invalid requests are refused before they reach the pipeline; speech always has the
requested voice and format. Source: note:api-server 1.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    ClientError,
    SpeechError,
    speech_error_for_status,
    speech_server_error,
    status_and_message,
)
from omni_proxy.replica.api.common.media import (
    MediaError,
    MediaRules,
    decode_audio_samples,
    decode_base64,
    encode_audio,
    read_media,
    to_stage_audio,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.speech.speech_fields import (
    MEDIA_TYPES,
    SpeechRequest,
    VoiceReference,
    check_input,
)
from omni_proxy.replica.pipeline.client import (
    CompletionResult,
    GenerateRequest,
)

ENCODABLE_FORMATS: Final = ("wav", "pcm")
DEFAULT_SAMPLE_RATE: Final = 24_000  # for audio whose stage reports no rate
NO_AUDIO: Final = "No audio output generated from the pipeline."
MODEL_VOICES: Final = ("default", "heart")
# fmt: off
OPENAI_VOICES: Final = frozenset({
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable",
    "marin", "nova", "onyx", "sage", "shimmer", "verse",
})
# fmt: on
VOICE_CLONING: Final = "voice_clone"


def to_speech_error(error: ClientError | SpeechError) -> SpeechError:
    """Return the speech error for an error of the pipeline client; a SpeechError is returned."""
    if isinstance(error, SpeechError):
        return error
    status, message = status_and_message(error)
    return speech_error_for_status(message, status)


@dataclass(frozen=True, slots=True)
class SpeechResult:
    """One complete response: the encoded bytes, and the pipeline's result."""

    data: bytes
    media_type: str
    result: CompletionResult


class SpeechService:
    """Checks requests, converts them for the pipeline and runs them."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        local = context.allowed_local_media_path
        self._rules = MediaRules(
            allowed_domains=tuple(context.allowed_media_domains),
            allowed_folder=Path(local) if local is not None else None,
            max_bytes=context.max_media_bytes,
        )
        capabilities = context.capabilities
        self._can_clone = capabilities is not None and VOICE_CLONING in capabilities

    def check_available(self) -> None:
        """Raises SpeechError if the pipeline has no speech stage."""
        if not self._context.can("speech"):
            raise SpeechError(
                "this replica has no speech model; start it with --speech hibari",
                kind="invalid_request_error",
                code="speech_not_available",
            )

    def check(self, request: SpeechRequest, *, with_input: bool = True) -> None:
        """Raises SpeechError for a request that this replica cannot synthesize."""
        self.check_available()
        if with_input:
            check_input(request, self._context.max_speech_input_chars)
        if request.response_format not in ENCODABLE_FORMATS:
            raise speech_server_error(
                f"missing encoder for {request.response_format}: "
                f"this replica writes {' and '.join(ENCODABLE_FORMATS)}",
                503,
            )
        self._check_voice(request)

    def _check_voice(self, request: SpeechRequest) -> None:
        if self._can_clone:
            return
        voice = request.voice.lower()
        if voice not in MODEL_VOICES and voice not in OPENAI_VOICES:
            raise SpeechError(
                f"this model has one voice: voice must be {' or '.join(MODEL_VOICES)} (OpenAI's "
                f"names mean the same one), not {request.voice!r}",
                "voice",
            )
        if request.references:
            path = request.references[0].path
            raise SpeechError("this model has one voice and cannot use reference audio", path)

    async def to_generate_request(
        self, speech_request: SpeechRequest, *, stream: bool
    ) -> GenerateRequest:
        """Return the request for the pipeline, with its reference audio read and decoded."""
        references = [
            await self._read_reference(reference) for reference in speech_request.references
        ]
        return speech_request.generate_request(stream=stream, references=references or None)

    async def _read_reference(self, reference: VoiceReference) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if reference.text is not None:
            fields["text"] = reference.text
        if reference.source is None:
            return fields | {"vq_codes": reference.vq_codes}
        try:
            if reference.path.endswith(".data") and not reference.source.startswith("data:"):
                data = decode_base64(reference.source, self._rules.max_bytes)
            else:
                data = await read_media(reference.source, self._rules)
            samples, rate = await trio.to_thread.run_sync(decode_audio_samples, data)
        except (MediaError, ValueError) as error:
            raise SpeechError(str(error), reference.path) from None
        return fields | to_stage_audio(samples, rate)

    async def synthesize(self, speech_request: SpeechRequest, request_id: str) -> SpeechResult:
        """Synthesize and return the complete file. Raises SpeechError."""
        request = await self.to_generate_request(speech_request, stream=False)
        try:
            result = await self._context.client.completion(request, request_id)
        except CLIENT_ERRORS as error:
            raise to_speech_error(error) from None
        if not result.audio:
            raise speech_server_error(NO_AUDIO)
        rate = result.sample_rate or DEFAULT_SAMPLE_RATE
        data = encode_audio(result.audio, rate, speech_request.response_format)
        return SpeechResult(data, MEDIA_TYPES[speech_request.response_format], result)


def engine_secs(usage: dict[str, Any] | None, extra: dict[str, Any]) -> float | None:
    """Return the engine time, if the pipeline reports it."""
    secs = (usage or {}).get("engine_time_s", extra.get("engine_time_s"))
    return float(secs) if secs is not None else None
