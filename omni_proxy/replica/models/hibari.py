"""Speech synthesis by the hibari voice "heart", contained in the package hibari-tts, 24 kHz.

Invariant: no other voice name reaches the package, because it would download that voice. The noise
of a sentence depends on the seed and the sentence's index alone, so equal requests give equal
bytes, whether the text arrived at once or in chunks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from omni_proxy.replica.audio import Samples, resample

VOICE = "heart"
# OpenAI clients always name an OpenAI voice; all mean the only voice here (api-server.md 1.4).
VOICE_ALIASES = (
    *("default", "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)
SLOWEST, FASTEST = 0.25, 4.0
MODEL_SLOWEST, MODEL_FASTEST = 0.5, 2.0
# The package splits long sentences at clauses only; longer runs without clauses are slow.
MAX_PHONEMES = 400


class VoiceError(ValueError):
    """The request cannot be synthesized; the text says why and what is possible."""


class MissingVoiceError(Exception):
    """The package hibari-tts is not installed."""


def voices() -> tuple[str, ...]:
    """Return every name that `check_voice` accepts, the model's own first."""
    return (VOICE, *VOICE_ALIASES)


def check_voice(name: str) -> str:
    """Return the voice for `name`; raises VoiceError for an unknown name."""
    if name.strip().lower() not in voices():
        raise VoiceError(f"there is no voice {name!r} here: choose one of {', '.join(voices())}")
    return VOICE


def check_speed(speed: float) -> float:
    """Return `speed`; raises VoiceError outside 0.25 to 4."""
    if not SLOWEST <= speed <= FASTEST:
        raise VoiceError(f"speed {speed} is not within {SLOWEST} and {FASTEST}")
    return speed


class HibariVoice:
    """The loaded voice. Not thread-safe."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.sample_rate: int = engine.sample_rate

    @classmethod
    def load(cls, threads: int = 1) -> HibariVoice:
        """Load model and lexicons; synthesizes one word, since the first one is slow.

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
        found: list[str] = self._engine.split_sentences(text)
        return found

    def sentences(self, text: str, *, speed: float = 1.0, seed: int = 0) -> Iterator[Samples]:
        """Yield one float32 array at `sample_rate` per sentence, several for a very long one.

        Text without an English pronunciation yields nothing. Raises VoiceError for the speed.
        """
        check_speed(speed)
        for place, sentence in enumerate(self.split(text)):
            yield from self.speak(sentence, speed=speed, seed=seed, place=place)

    def speak(
        self, sentence: str, *, speed: float = 1.0, seed: int = 0, place: int = 0
    ) -> Iterator[Samples]:
        """Yield the arrays of the one sentence with index `place` in its text."""
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
    """Split at blanks, so that no run of the model takes seconds."""
    while len(phonemes) > MAX_PHONEMES:
        cut = phonemes.rfind(" ", 1, MAX_PHONEMES)
        cut = cut if cut > 0 else MAX_PHONEMES
        yield phonemes[:cut]
        phonemes = phonemes[cut:].lstrip(" ")
    if phonemes:
        yield phonemes


class IncrementalSentences:
    """Returns sentences as soon as they are complete in a text that arrives in chunks.

    Invariant: `feed` and `flush` together return what `split` returns for the whole text.
    """

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        self._rest = ""

    def feed(self, piece: str) -> list[str]:
        """Add text; return the sentences that no later text can change."""
        self._rest += piece
        found = self._split(self._rest)
        if not found:
            return []
        # Whether the last sentence is complete depends on the word that follows.
        written = self._rest.rstrip()
        self._rest = found[-1] + self._rest[len(written) :]
        return found[:-1]

    def flush(self) -> list[str]:
        """Return the sentences that are left at the end of the text."""
        found = self._split(self._rest)
        self._rest = ""
        return found
