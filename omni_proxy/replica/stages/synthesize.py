"""The stage that speaks: text in, one chunk of audio for each sentence out, by hibari.

Invariant: the result's audio is that of all chunks in their order, and depends on text, voice,
speed and seed alone, whether the text came at once or in pieces.
Usage counts words as prompt tokens and the voice's frames of 12.5 ms as completion tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from omni_proxy.replica.audio.resample import Samples
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
    """What this stage needs of a voice; `HibariVoice` has it."""

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
    """Return the text to be spoken: the input itself, or what the stage before made."""
    data = payload.data if isinstance(payload.data, Mapping) else {}
    inputs = data.get("raw_inputs", payload.request.inputs)
    for held in (data, inputs):
        if isinstance(held, Mapping) and isinstance(held.get("text"), str):
            return str(held["text"])
    if isinstance(inputs, str):
        return inputs
    raise CallerError("the request has no text to speak")


@dataclass(frozen=True, slots=True)
class VoiceParams:
    """How a request wants to be spoken."""

    speed: float
    seed: int

    @classmethod
    def of(cls, payload: StagePayload, stage_name: str) -> VoiceParams:
        """Read `tts_params` (or a chat's `audio`), then what is meant for this stage alone.

        Raises CallerError for a voice or a speed that there is none of.
        """
        metadata, params = payload.request.metadata, payload.request.params
        asked: dict[str, Any] = {}
        for part in (
            metadata.get("audio"),
            metadata.get("tts_params"),
            (params.get("stage_params") or {}).get(stage_name),
        ):
            asked |= part if isinstance(part, Mapping) else {}
        try:
            check_voice(str(asked.get("voice") or "default"))
            speed = check_speed(float(asked.get("speed", 1.0)))
            seed = int(asked.get("seed") or params.get("seed") or 0)
        except VoiceError as error:
            raise CallerError(str(error)) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise CallerError(f"speed or seed is no number: {error}") from error
        return cls(speed, seed)


class SpeechSynthesis:
    """One request: sentences are spoken as soon as they are complete."""

    def __init__(
        self, voice: VoiceModel, manner: VoiceParams, emit_chunk: EmitChunk, aborted: Aborted
    ) -> None:
        self._voice = voice
        self._manner = manner
        self._emit_chunk = emit_chunk
        self._aborted = aborted
        self._cutter = IncrementalSentences(voice.split)
        self._spoken: list[Samples] = []
        self._sentences = 0
        self._words = 0
        self._engine_secs = 0.0

    def feed(self, chunk: dict[str, Any]) -> None:
        """Take the next piece of the text under "text"."""
        self._speak(self._cutter.feed(chunk.get("text") or ""))

    def finish(self) -> dict[str, Any]:
        """Speak what is left and return the result."""
        self._speak(self._cutter.flush())
        samples = np.concatenate([np.zeros(0, np.float32), *self._spoken])
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

    def _speak(self, sentences: list[str]) -> None:
        for sentence in sentences:
            if self._aborted():
                return
            started = time.perf_counter()
            samples = self._voiced(sentence)
            self._engine_secs += time.perf_counter() - started
            self._sentences += 1
            self._words += len(sentence.split())
            if len(samples):
                self._spoken.append(samples)
                self._emit_chunk(self._chunk(samples))

    def _voiced(self, sentence: str) -> Samples:
        pieces = [np.zeros(0, np.float32)]
        speed, seed, place = self._manner.speed, self._manner.seed, self._sentences
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
