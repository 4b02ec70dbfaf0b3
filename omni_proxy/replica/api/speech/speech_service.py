"""What every way of asking for speech shares: may it be spoken, by whom, and in which bytes.

Invariant: whatever is refused here is refused before the pipeline hears of it; nothing is spoken
in another voice or another format than the one that was asked for. Source: api-server.md 1.4.
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
DEFAULT_SAMPLE_RATE: Final = 24_000  # of audio whose stage tells none
NO_AUDIO: Final = "No audio output generated from the pipeline."
MODEL_VOICES: Final = ("default", "heart")
# fmt: off
OPENAI_VOICES: Final = frozenset({
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable",
    "marin", "nova", "onyx", "sage", "shimmer", "verse",
})
# fmt: on
VOICE_CLONING: Final = "voice_clone"


def to_speech_error(fault: ClientError | SpeechError) -> SpeechError:
    """Return the error for what the pipeline's client raised; a refusal stays what it is."""
    if isinstance(fault, SpeechError):
        return fault
    status, message = status_and_message(fault)
    return speech_error_for_status(message, status)


@dataclass(frozen=True, slots=True)
class SpeechResult:
    """One whole answer: the encoded bytes, and what the pipeline said about them."""

    data: bytes
    media_type: str
    result: CompletionResult


class SpeechService:
    """Checks asks, lowers them and has them spoken by one replica."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        local = context.allowed_local_media_path
        self._rules = MediaRules(
            allowed_domains=tuple(context.allowed_media_domains),
            allowed_folder=Path(local) if local is not None else None,
            most_bytes=context.max_media_bytes,
        )
        known = context.capabilities
        self._clones = known is not None and VOICE_CLONING in known

    def check_available(self) -> None:
        """Refuse where the pipeline has no stage that speaks."""
        if not self._context.can("speech"):
            raise SpeechError(
                "this replica does not speak; start it with --speech hibari",
                kind="invalid_request_error",
                code="speech_not_available",
            )

    def check(self, ask: SpeechRequest, *, with_input: bool = True) -> None:
        """Refuse what this replica cannot speak as asked."""
        self.check_available()
        if with_input:
            check_input(ask, self._context.max_speech_input_chars)
        if ask.response_format not in ENCODABLE_FORMATS:
            raise speech_server_error(
                f"missing encoder for {ask.response_format}: "
                f"this replica writes {' and '.join(ENCODABLE_FORMATS)}",
                503,
            )
        self._check_voice(ask)

    def _check_voice(self, ask: SpeechRequest) -> None:
        if self._clones:
            return
        voice = ask.voice.lower()
        if voice not in MODEL_VOICES and voice not in OPENAI_VOICES:
            raise SpeechError(
                f"this model has one voice: voice must be {' or '.join(MODEL_VOICES)} (OpenAI's "
                f"names mean the same one), not {ask.voice!r}",
                "voice",
            )
        if ask.references:
            path = ask.references[0].path
            raise SpeechError("this model has one voice: it follows no reference audio", path)

    async def lower(self, ask: SpeechRequest, *, stream: bool) -> GenerateRequest:
        """Return the request for the pipeline, with its reference audio read and decoded."""
        read = [await self._read(one) for one in ask.references]
        return ask.generate_request(stream=stream, references=read or None)

    async def _read(self, one: VoiceReference) -> dict[str, Any]:
        lowered: dict[str, Any] = {}
        if one.text is not None:
            lowered["text"] = one.text
        if one.source is None:
            return lowered | {"vq_codes": one.vq_codes}
        try:
            if one.path.endswith(".data") and not one.source.startswith("data:"):
                data = decode_base64(one.source, self._rules.most_bytes)
            else:
                data = await read_media(one.source, self._rules)
            samples, rate = await trio.to_thread.run_sync(decode_audio_samples, data)
        except (MediaError, ValueError) as fault:
            raise SpeechError(str(fault), one.path) from None
        return lowered | to_stage_audio(samples, rate)

    async def speak(self, ask: SpeechRequest, request_id: str) -> SpeechResult:
        """Have it spoken and return the whole file. Raises SpeechError."""
        request = await self.lower(ask, stream=False)
        try:
            result = await self._context.client.completion(request, request_id)
        except CLIENT_ERRORS as fault:
            raise to_speech_error(fault) from None
        if not result.audio:
            raise speech_server_error(NO_AUDIO)
        rate = result.sample_rate or DEFAULT_SAMPLE_RATE
        data = encode_audio(result.audio, rate, ask.response_format)
        return SpeechResult(data, MEDIA_TYPES[ask.response_format], result)


def engine_secs(usage: dict[str, Any] | None, extra: dict[str, Any]) -> float | None:
    """Return how long the engine worked, where the pipeline told it."""
    told = (usage or {}).get("engine_time_s", extra.get("engine_time_s"))
    return float(told) if told is not None else None
