"""What every way of asking for speech shares: may it be spoken, by whom, and in which bytes.

Invariant: whatever is refused here is refused before the pipeline hears of it; nothing is spoken
in another voice or another format than the one that was asked for. Source: api-server.md 1.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from omni_proxy.replica.api.audio_forms import (
    ReferenceRefused,
    ReferenceRules,
    as_media,
    decode_base64,
    decode_samples,
    read_reference,
)
from omni_proxy.replica.api.envelope import SpeechRefusal, of_failure, server_fault
from omni_proxy.replica.api.errors import CLIENT_ERRORS, ClientError, refusal_of
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.api.speech_fields import (
    MEDIA_TYPES,
    Reference,
    SpeechAsk,
    check_input,
)
from omni_proxy.replica.pipeline.client import (
    CompletionResult,
    GenerateRequest,
)

ENCODABLE: Final = ("wav", "pcm")
USUAL_RATE: Final = 24_000  # of audio whose stage tells none
NO_AUDIO: Final = "No audio output generated from the pipeline."
OWN_VOICES: Final = ("default", "heart")
# fmt: off
OPENAI_VOICES: Final = frozenset({
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable",
    "marin", "nova", "onyx", "sage", "shimmer", "verse",
})
# fmt: on
CLONING: Final = "voice_clone"


def as_refusal(fault: ClientError | SpeechRefusal) -> SpeechRefusal:
    """Return the error for what the pipeline's client raised; a refusal stays what it is."""
    if isinstance(fault, SpeechRefusal):
        return fault
    status, message = refusal_of(fault)
    return of_failure(message, status)


def encode(audio: bytes, rate: int, response_format: str) -> bytes:
    """Return float32 little-endian mono `audio` as a whole file of that format (wav or pcm)."""
    import numpy as np  # only where there is audio

    from omni_proxy.replica.audio.wav import encode_pcm16, encode_wav

    samples = np.frombuffer(audio, "<f4")
    return encode_wav(samples, rate) if response_format == "wav" else encode_pcm16(samples)


@dataclass(frozen=True, slots=True)
class Spoken:
    """One whole answer: the encoded bytes, and what the pipeline said about them."""

    data: bytes
    media_type: str
    result: CompletionResult


class Speaking:
    """Checks asks, lowers them and has them spoken by one replica."""

    def __init__(self, served: Served) -> None:
        self._served = served
        local = served.allowed_local_media_path
        self._rules = ReferenceRules(
            allowed_domains=tuple(served.allowed_media_domains),
            allowed_folder=Path(local) if local is not None else None,
            most_bytes=served.max_media_bytes,
        )
        known = served.capabilities
        self._clones = known is not None and CLONING in known

    def check_available(self) -> None:
        """Refuse where the pipeline has no stage that speaks."""
        if not self._served.can("speech"):
            raise SpeechRefusal(
                "this replica does not speak; start it with --speech hibari",
                kind="invalid_request_error",
                code="speech_not_available",
            )

    def check(self, ask: SpeechAsk, *, with_input: bool = True) -> None:
        """Refuse what this replica cannot speak as asked."""
        self.check_available()
        if with_input:
            check_input(ask, self._served.max_speech_input_chars)
        if ask.response_format not in ENCODABLE:
            raise server_fault(
                f"missing encoder for {ask.response_format}: "
                f"this replica writes {' and '.join(ENCODABLE)}",
                503,
            )
        self._check_voice(ask)

    def _check_voice(self, ask: SpeechAsk) -> None:
        if self._clones:
            return
        voice = ask.voice.lower()
        if voice not in OWN_VOICES and voice not in OPENAI_VOICES:
            raise SpeechRefusal(
                f"this model has one voice: voice must be {' or '.join(OWN_VOICES)} (OpenAI's "
                f"names mean the same one), not {ask.voice!r}",
                "voice",
            )
        if ask.references:
            path = ask.references[0].path
            raise SpeechRefusal("this model has one voice: it follows no reference audio", path)

    async def lower(self, ask: SpeechAsk, *, stream: bool) -> GenerateRequest:
        """Return the request for the pipeline, with its reference audio read and decoded."""
        read = [await self._read(one) for one in ask.references]
        return ask.generate_request(stream=stream, references=read or None)

    async def _read(self, one: Reference) -> dict[str, Any]:
        lowered: dict[str, Any] = {}
        if one.text is not None:
            lowered["text"] = one.text
        if one.source is None:
            return lowered | {"vq_codes": one.vq_codes}
        try:
            if one.path.endswith(".data") and not one.source.startswith("data:"):
                data = decode_base64(one.source, self._rules.most_bytes)
            else:
                data = await read_reference(one.source, self._rules)
            samples, rate = await trio.to_thread.run_sync(decode_samples, data)
        except (ReferenceRefused, ValueError) as fault:
            raise SpeechRefusal(str(fault), one.path) from None
        return lowered | as_media(samples, rate)

    async def speak(self, ask: SpeechAsk, request_id: str) -> Spoken:
        """Have it spoken and return the whole file. Raises SpeechRefusal."""
        request = await self.lower(ask, stream=False)
        try:
            result = await self._served.client.completion(request, request_id)
        except CLIENT_ERRORS as fault:
            raise as_refusal(fault) from None
        if not result.audio:
            raise server_fault(NO_AUDIO)
        rate = result.sample_rate or USUAL_RATE
        data = encode(result.audio, rate, ask.response_format)
        return Spoken(data, MEDIA_TYPES[ask.response_format], result)


def engine_secs(usage: dict[str, Any] | None, extra: dict[str, Any]) -> float | None:
    """Return how long the engine worked, where the pipeline told it."""
    told = (usage or {}).get("engine_time_s", extra.get("engine_time_s"))
    return float(told) if told is not None else None
