"""The speech stage ("speak"): text in, one chunk of audio per sentence out, by hibari.

Invariant: the result's audio is that of all chunks in order, and depends on text, voice, speed and
seed alone, whether the text arrived at once or in chunks. Usage counts words as prompt tokens and
frames of 12.5 ms as completion tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from omni_proxy.replica.audio import Samples
from omni_proxy.replica.models.hibari import (
    HibariVoice,
    IncrementalSentences,
    VoiceError,
    check_speed,
    check_voice,
)
from omni_proxy.replica.pipeline.messages import StagePayload
from omni_proxy.replica.pipeline.stage import (
    Aborted,
    CallerError,
    EmitChunk,
    FunctionScheduler,
)

FRAME_SECS = 0.0125


class VoiceModel(Protocol):
    """What this stage needs of a voice; HibariVoice has it."""

    sample_rate: int

    def split(self, text: str) -> list[str]: ...

    def speak(
        self, sentence: str, *, speed: float = ..., seed: int = ..., place: int = ...
    ) -> Iterator[Samples]: ...


def build(stage_name: str, *, threads: int = 1) -> FunctionScheduler:
    """Load the voice and return the stage; `threads` compute it. Raises MissingVoiceError."""
    return make_stage(stage_name, HibariVoice.load(threads))


def make_stage(stage_name: str, voice: VoiceModel) -> FunctionScheduler:
    """Return the stage over a loaded voice, which one request at a time may use."""

    def open_feed(
        payload: StagePayload, emit_chunk: EmitChunk, aborted: Aborted
    ) -> SpeechSynthesis:
        return SpeechSynthesis(voice, VoiceParams.of(payload, stage_name), emit_chunk, aborted)

    def speak_all(payload: StagePayload, emit_chunk: EmitChunk, aborted: Aborted) -> dict[str, Any]:
        text = input_text(payload)
        speech = open_feed(payload, emit_chunk, aborted)
        speech.feed({"text": text})
        result = speech.finish()
        if not result["audio_data"] and not aborted():
            raise CallerError("the text holds nothing that can be spoken: the voice is English")
        return result

    return FunctionScheduler(stage_name, speak_all, open_feed=open_feed, marks="model_path")


def input_text(payload: StagePayload) -> str:
    """Return the text to speak: the input itself, or the previous stage's output."""
    data = payload.data if isinstance(payload.data, Mapping) else {}
    inputs = data.get("raw_inputs", payload.request.inputs)
    for source in (data, inputs):
        if isinstance(source, Mapping) and isinstance(source.get("text"), str):
            return str(source["text"])
    if isinstance(inputs, str):
        return inputs
    raise CallerError("the request has no text to speak")


@dataclass(frozen=True, slots=True)
class VoiceParams:
    """Speed and seed of a request."""

    speed: float
    seed: int

    @classmethod
    def of(cls, payload: StagePayload, stage_name: str) -> VoiceParams:
        """Read `tts_params` (or a chat's `audio`), then the parameters for this stage.

        Raises CallerError for an unknown voice or an invalid speed.
        """
        metadata, params = payload.request.metadata, payload.request.params
        merged: dict[str, Any] = {}
        for params_source in (
            metadata.get("audio"),
            metadata.get("tts_params"),
            (params.get("stage_params") or {}).get(stage_name),
        ):
            merged |= params_source if isinstance(params_source, Mapping) else {}
        try:
            check_voice(str(merged.get("voice") or "default"))
            speed = check_speed(float(merged.get("speed", 1.0)))
            seed = int(merged.get("seed") or params.get("seed") or 0)
        except VoiceError as error:
            raise CallerError(str(error)) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise CallerError(f"speed or seed is no number: {error}") from error
        return cls(speed, seed)


class SpeechSynthesis:
    """One request: each sentence is synthesized as soon as it is complete."""

    def __init__(
        self, voice: VoiceModel, params: VoiceParams, emit_chunk: EmitChunk, aborted: Aborted
    ) -> None:
        self._voice = voice
        self._params = params
        self._emit_chunk = emit_chunk
        self._aborted = aborted
        self._sentence_splitter = IncrementalSentences(voice.split)
        self._audio: list[Samples] = []
        self._sentences = 0
        self._words = 0
        self._engine_secs = 0.0

    def feed(self, chunk: dict[str, Any]) -> None:
        """Take the next chunk of text, under "text"."""
        self._synthesize(self._sentence_splitter.feed(chunk.get("text") or ""))

    def finish(self) -> dict[str, Any]:
        """Synthesize the remaining text and return the result."""
        self._synthesize(self._sentence_splitter.flush())
        samples = np.concatenate([np.zeros(0, np.float32), *self._audio])
        duration_secs = len(samples) / self._voice.sample_rate
        frames = round(duration_secs / FRAME_SECS)
        return {
            **self._chunk(samples),
            "duration": duration_secs,
            "finish_reason": "stop",
            "usage": {
                "prompt_tokens": self._words,
                "completion_tokens": frames,
                "total_tokens": self._words + frames,
            },
            "engine_time_s": self._engine_secs,
        }

    def _synthesize(self, sentences: list[str]) -> None:
        for sentence in sentences:
            if self._aborted():
                return
            started = time.perf_counter()
            samples = self._synthesize_sentence(sentence)
            self._engine_secs += time.perf_counter() - started
            self._sentences += 1
            self._words += len(sentence.split())
            if len(samples):
                self._audio.append(samples)
                self._emit_chunk(self._chunk(samples))

    def _synthesize_sentence(self, sentence: str) -> Samples:
        pieces = [np.zeros(0, np.float32)]
        speed, seed, place = self._params.speed, self._params.seed, self._sentences
        for piece in self._voice.speak(sentence, speed=speed, seed=seed, place=place):
            pieces.append(piece)
            if self._aborted():
                break
        return np.concatenate(pieces)

    def _chunk(self, samples: Samples) -> dict[str, Any]:
        return {
            "audio_data": samples.astype("<f4").tobytes(),
            "sample_rate": self._voice.sample_rate,
            "modality": "audio",
        }
