"""Speech: the hibari voice "heart", which lies whole inside the package hibari-tts, 24 kHz.

Invariant: no other voice name ever reaches the package, because it would download that voice.
The noise of a sentence depends on the seed and the sentence's place alone, so equal requests give
equal bytes, however the text arrived.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from omni_proxy.replica.audio.resample import Samples, resample

VOICE = "heart"
# OpenAI's clients name one of theirs always; all mean the only voice there is (api-server.md 1.4).
VOICE_ALIASES = (
    *("default", "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)
SLOWEST, FASTEST = 0.25, 4.0
MODEL_SLOWEST, MODEL_FASTEST = 0.5, 2.0
# The package cuts a long sentence at clauses only: words without any took 13 s in one piece.
MAX_PHONEMES = 400


class VoiceError(ValueError):
    """What was asked cannot be spoken; the text says why and what can."""


class MissingVoiceError(Exception):
    """The package hibari-tts is not installed."""


def voices() -> tuple[str, ...]:
    """Return every name that `check_voice` accepts, the voice's own first."""
    return (VOICE, *VOICE_ALIASES)


def check_voice(name: str) -> str:
    """Return the voice that `name` means; raises VoiceError for a name that means none."""
    if name.strip().lower() not in voices():
        raise VoiceError(f"there is no voice {name!r} here: choose one of {', '.join(voices())}")
    return VOICE


def check_speed(speed: float) -> float:
    """Return `speed`; raises VoiceError outside 0.25 to 4."""
    if not SLOWEST <= speed <= FASTEST:
        raise VoiceError(f"speed {speed} is not within {SLOWEST} and {FASTEST}")
    return speed


class HibariVoice:
    """The loaded voice. One thread at a time may use it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.sample_rate: int = engine.sample_rate

    @classmethod
    def load(cls, threads: int = 1) -> HibariVoice:
        """Load model and lexicons; speaks one word, since the first costs half a second more.

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
        """Return the sentences of `text`, none of them blank."""
        found: list[str] = self._engine.split_sentences(text)
        return found

    def sentences(self, text: str, *, speed: float = 1.0, seed: int = 0) -> Iterator[Samples]:
        """Yield one float32 array at `sample_rate` per sentence, a very long one in several.

        What has no pronunciation in English yields nothing. Raises VoiceError for the speed.
        """
        check_speed(speed)
        for place, sentence in enumerate(self.split(text)):
            yield from self.speak(sentence, speed=speed, seed=seed, place=place)

    def speak(
        self, sentence: str, *, speed: float = 1.0, seed: int = 0, place: int = 0
    ) -> Iterator[Samples]:
        """Yield the arrays of the one sentence that is number `place` of its text."""
        model_speed = min(max(check_speed(speed), MODEL_SLOWEST), MODEL_FASTEST)
        noise = np.random.default_rng((seed % (1 << 64), place))
        for phonemes in self._engine.phonemize(_plain_digits(sentence)):
            for piece in _pieces(phonemes):
                ids = self._engine.ids(piece)
                samples: Samples = self._engine.from_ids(ids, model_speed, noise)
                if len(samples):
                    yield resample(samples, speed / model_speed, 1.0)


def _plain_digits(sentence: str) -> str:
    # The package takes a raised or circled digit for one of a number, and int() does not.
    return "".join(
        str(unicodedata.digit(char)) if char.isdigit() and not char.isdecimal() else char
        for char in sentence
    )


def _pieces(phonemes: str) -> Iterator[str]:
    """Cut between words where there is a blank, so that no run of the model takes seconds."""
    while len(phonemes) > MAX_PHONEMES:
        cut = phonemes.rfind(" ", 1, MAX_PHONEMES)
        cut = cut if cut > 0 else MAX_PHONEMES
        yield phonemes[:cut]
        phonemes = phonemes[cut:].lstrip(" ")
    if phonemes:
        yield phonemes


class IncrementalSentences:
    """Gives back sentences as soon as they are complete in a text that arrives in pieces.

    Invariant: what `feed` and `flush` give back together is what `split` makes of the whole text.
    """

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        self._rest = ""

    def feed(self, piece: str) -> list[str]:
        """Take new text; return the sentences that no later text can change."""
        self._rest += piece
        found = self._split(self._rest)
        if not found:
            return []
        # Whether the last one is over depends on the word that follows.
        written = self._rest.rstrip()
        self._rest = found[-1] + self._rest[len(written) :]
        return found[:-1]

    def flush(self) -> list[str]:
        """Return what is left at the end of the text."""
        found = self._split(self._rest)
        self._rest = ""
        return found
