"""The speech stage ("speak"): text in, one chunk of audio per sentence out, with hibari-tts.

Invariant: the result's audio is that of all chunks in order. It depends only on text, voice, speed
and seed, not on how the text was divided into chunks; a sentence's noise depends on the seed and
its index. Only the voice "heart", which the package contains, is used: the package would download
any other. Usage counts words as prompt tokens and frames of 12.5 ms as completion tokens.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from omni_proxy.replica.audio import Samples, resample
from omni_proxy.replica.pipeline.stage import (
    Aborted,
    CallerError,
    EmitChunk,
    FunctionScheduler,
)
from omni_proxy.replica.pipeline.stage_messages import StagePayload

VOICE = "heart"
# OpenAI's clients always send one of its voices; all are mapped to this one (note:api-server 1.4).
VOICE_ALIASES = (
    *("default", "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)
MIN_SPEED, MAX_SPEED = 0.25, 4.0
MODEL_SLOWEST, MODEL_FASTEST = 0.5, 2.0
# The package splits long sentences only at clauses; long runs without clauses are slow.
MAX_PHONEMES = 400
FRAME_SECS = 0.0125


class VoiceError(ValueError):
    """The request cannot be synthesized; the message has the reason and the valid values."""


class MissingVoiceError(Exception):
    """The package hibari-tts is not installed."""


def voices() -> tuple[str, ...]:
    """Return every name that `check_voice` accepts, the model's own first."""
    return (VOICE, *VOICE_ALIASES)


def check_voice(name: str) -> str:
    """Return the model's voice for `name`; raises VoiceError for an unknown name."""
    if name.strip().lower() not in voices():
        raise VoiceError(f"there is no voice {name!r}: choose one of {', '.join(voices())}")
    return VOICE


def check_speed(speed: float) -> float:
    """Return `speed`; raises VoiceError outside 0.25 to 4."""
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise VoiceError(f"speed {speed} is not within {MIN_SPEED} and {MAX_SPEED}")
    return speed


class HibariVoice:
    """The loaded voice. Not thread-safe."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.sample_rate: int = engine.sample_rate

    @classmethod
    def load(cls, threads: int = 1) -> HibariVoice:
        """Load model and lexicons, and synthesize one word, since the first synthesis is slow.

        Raises MissingVoiceError.
        """
        try:
            from hibari import Hibari  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingVoiceError(
                f"speech needs hibari-tts ({error}): pip install 'omni-proxy[replica]'"
            ) from error
        voice = cls(Hibari(voice=VOICE, threads=threads))
        for _ in voice.sentences("Hello."):
            pass
        return voice

    def split(self, text: str) -> list[str]:
        """Return the sentences of `text`, without blank ones."""
        sentences: list[str] = self._engine.split_sentences(text)
        return sentences

    def sentences(self, text: str, *, speed: float = 1.0, seed: int = 0) -> Iterator[Samples]:
        """Yield one float32 array at `sample_rate` per sentence, several for a very long one.

        Text without an English pronunciation yields nothing. Raises VoiceError for the speed.
        """
        check_speed(speed)
        for place, sentence in enumerate(self.split(text)):
            yield from self.synthesize(sentence, speed=speed, seed=seed, place=place)

    def synthesize(
        self, sentence: str, *, speed: float = 1.0, seed: int = 0, place: int = 0
    ) -> Iterator[Samples]:
        """Yield the arrays of one sentence, which has index `place` in its text."""
        model_speed = min(max(check_speed(speed), MODEL_SLOWEST), MODEL_FASTEST)
        noise = np.random.default_rng((seed % (1 << 64), place))
        for phonemes in self._engine.phonemize(_plain_digits(sentence)):
            for piece in _split_phonemes(phonemes):
                ids = self._engine.ids(piece)
                samples: Samples = self._engine.from_ids(ids, model_speed, noise)
                if len(samples):
                    yield resample(samples, speed / model_speed, 1.0)


def _plain_digits(sentence: str) -> str:
    # The package treats superscript and circled digits as digits of a number; int() does not.
    return "".join(
        str(unicodedata.digit(char)) if char.isdigit() and not char.isdecimal() else char
        for char in sentence
    )


def _split_phonemes(phonemes: str) -> Iterator[str]:
    """Split at blanks into runs of at most MAX_PHONEMES."""
    while len(phonemes) > MAX_PHONEMES:
        cut = phonemes.rfind(" ", 1, MAX_PHONEMES)
        cut = cut if cut > 0 else MAX_PHONEMES
        yield phonemes[:cut]
        phonemes = phonemes[cut:].lstrip(" ")
    if phonemes:
        yield phonemes


class IncrementalSentences:
    """Splits a text that arrives in chunks into sentences, each as soon as it is complete.

    Invariant: `feed` and `flush` together return what `split` returns for the whole text.
    """

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        self._rest = ""

    def feed(self, piece: str) -> list[str]:
        """Add text; return the sentences that no later text can change."""
        self._rest += piece
        sentences = self._split(self._rest)
        if not sentences:
            return []
        # The next word determines whether the last sentence is complete.
        written = self._rest.rstrip()
        self._rest = sentences[-1] + self._rest[len(written) :]
        return sentences[:-1]

    def flush(self) -> list[str]:
        """Return the sentences that are left at the end of the text."""
        sentences = self._split(self._rest)
        self._rest = ""
        return sentences


class VoiceModel(Protocol):
    """The interface of a voice, which HibariVoice implements."""

    sample_rate: int

    def split(self, text: str) -> list[str]: ...

    def synthesize(
        self, sentence: str, *, speed: float = ..., seed: int = ..., place: int = ...
    ) -> Iterator[Samples]: ...


def build(stage_name: str, *, threads: int = 1) -> FunctionScheduler:
    """Load the voice with `threads` threads and return the stage. Raises MissingVoiceError."""
    return make_stage(stage_name, HibariVoice.load(threads))


def make_stage(stage_name: str, voice: VoiceModel) -> FunctionScheduler:
    """Return the stage over a loaded voice, which serves one request at a time."""

    def open_feed(
        payload: StagePayload, emit_chunk: EmitChunk, aborted: Aborted
    ) -> SpeechSynthesis:
        return SpeechSynthesis(voice, VoiceParams.of(payload, stage_name), emit_chunk, aborted)

    def synthesize_text(
        payload: StagePayload, emit_chunk: EmitChunk, aborted: Aborted
    ) -> dict[str, Any]:
        text = input_text(payload)
        speech = open_feed(payload, emit_chunk, aborted)
        speech.feed({"text": text})
        result = speech.finish()
        if not result["audio_data"] and not aborted():
            raise CallerError("the text has nothing that can be synthesized: the voice is English")
        return result

    return FunctionScheduler(stage_name, synthesize_text, open_feed=open_feed, marks="model_path")


def input_text(payload: StagePayload) -> str:
    """Return the text to speak: the input itself, or the previous stage's output."""
    data = payload.data if isinstance(payload.data, Mapping) else {}
    inputs = data.get("raw_inputs", payload.request.inputs)
    for source in (data, inputs):
        if isinstance(source, Mapping) and isinstance(source.get("text"), str):
            return str(source["text"])
    if isinstance(inputs, str):
        return inputs
    raise CallerError("the request has no text to synthesize")


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
            raise CallerError(f"speed or seed is not a number: {error}") from error
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
        for piece in self._voice.synthesize(sentence, speed=speed, seed=seed, place=place):
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
