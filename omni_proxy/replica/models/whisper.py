"""Transcription with Whisper tiny.en: samples in, English text with times out.

Invariant: the chunks passed to `on_text`, joined, are the text of the transcript. Audio longer than
a window is split where it is quiet. Nothing is decoded after `aborted()` returned true.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from omni_proxy.replica.audio import Samples
from omni_proxy.replica.model_file import MODELS, cache_folder
from omni_proxy.replica.models.tokenizer import Utf8Stream, byte_letters
from omni_proxy.replica.models.whisper_net import (
    RATE,
    WINDOW_SAMPLES,
    WhisperFile,
    WhisperFileError,
    WhisperNet,
    log_mel,
    read_whisper_file,
)

LANGUAGE = "en"
MAX_WINDOW_TOKENS = 220  # more than 30 s of speech need; bounds a decoder that repeats itself
STUCK_TOKENS = 24  # this many tokens with at most two distinct ones are a tone or noise
SILENT_PEAK = 1e-3  # 60 dB below full scale
NO_SPEECH_PROBABILITY = 0.6
# A window ends in the quietest fifth of a second of its last ten seconds.
SEARCH_SAMPLES, QUIET_SAMPLES = 10 * RATE, RATE // 5

OnText = Callable[[str], None]
Aborted = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Segment:
    """The text between two times, in seconds from the start."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text and its segments; if aborted, those decoded until then.

    `cut` means that the token limit ended the text.
    """

    text: str
    language: str
    duration_secs: float
    segments: tuple[Segment, ...]
    cut: bool = False


class Whisper:
    """The loaded model. Thread-safe."""

    def __init__(self, file: WhisperFile) -> None:
        self._net = WhisperNet(file.variables)
        if len(file.vocabulary) != self._net.vocab_size:
            raise WhisperFileError(
                f"{len(file.vocabulary)} tokens do not fit a model of {self._net.vocab_size}"
            )
        place = {word: token for token, word in enumerate(file.vocabulary)}
        try:
            self._end = place["<|endoftext|>"]
            self._prompt = [place["<|startoftranscript|>"], place["<|notimestamps|>"]]
            self._no_speech = place["<|nocaptions|>"]
        except KeyError as error:
            raise WhisperFileError(f"the vocabulary lacks {error}") from error
        letters = byte_letters()
        # All ids after the end-of-text token are control tokens.
        self._words = [bytes(letters[c] for c in word) for word in file.vocabulary[: self._end]]
        self._never = torch.zeros(self._net.vocab_size)
        self._never[[*file.suppressed, *range(self._end + 1, self._net.vocab_size)]] = -torch.inf
        self._never_first = self._never.clone()
        self._never_first[list(file.suppressed_first)] = -torch.inf

    @classmethod
    def load(cls, path: Path | None = None) -> Whisper:
        """Load a model.bin, by default that of the cache folder. Raises WhisperFileError."""
        if path is None:
            path = cache_folder(os.environ) / MODELS["whisper-tiny"].file
        if not path.exists():
            raise WhisperFileError(
                f"{path} does not exist: run `omni-proxy replica fetch whisper-tiny`"
            )
        return cls(read_whisper_file(path))

    def transcribe(
        self,
        samples_16k: Samples,
        on_text: OnText = lambda _text: None,
        aborted: Aborted = lambda: False,
        max_tokens: int | None = None,
    ) -> Transcript:
        """Transcribe float32 samples at 16 kHz; `on_text` gets each new chunk of the text.

        `aborted` is called before each window and each token; `max_tokens` bounds all windows
        together.
        """
        segments = []
        pieces = _TextJoiner(on_text)
        budget = _TokenBudget(max_tokens)
        for start, end in windows(samples_16k):
            if aborted() or budget.spent:
                break
            length = len(pieces.text)
            pieces.next_window()
            self._transcribe_window(samples_16k[start:end], pieces, aborted, budget)
            if text := pieces.text[length:].strip():
                segments.append(Segment(start / RATE, end / RATE, text))
        duration_secs = len(samples_16k) / RATE
        return Transcript(pieces.text, LANGUAGE, duration_secs, tuple(segments), budget.spent)

    def _transcribe_window(
        self, samples: Samples, pieces: _TextJoiner, aborted: Aborted, budget: _TokenBudget
    ) -> None:
        if np.abs(samples).max(initial=0.0) < SILENT_PEAK:
            return
        text = Utf8Stream()
        for token in self._tokens(torch.from_numpy(log_mel(samples)), aborted):
            if not budget.take():
                break
            pieces.feed(text.feed(self._words[token]))
        pieces.feed(text.flush())

    def _tokens(self, mel: Tensor, aborted: Aborted) -> Iterator[int]:
        """Yield the most likely tokens, up to the end of the text or a repetition."""
        decoding = self._net.encode(mel)
        scores = self._net.decode(self._prompt, decoding)
        # At the position after the prompt's first token, this token means that there is no speech.
        if scores[0].softmax(0)[self._no_speech] > NO_SPEECH_PROBABILITY:
            return
        token = int((scores[-1] + self._never_first).argmax())
        recent: deque[int] = deque(maxlen=STUCK_TOKENS)
        for place in range(MAX_WINDOW_TOKENS):
            stuck = place >= STUCK_TOKENS and len(set(recent)) <= 2
            if token == self._end or stuck or aborted():
                return
            yield token
            recent.append(token)
            token = int((self._net.decode([token], decoding)[-1] + self._never).argmax())


def windows(samples: Samples) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the windows: at most 30 s each, together all samples."""
    start = 0
    while len(samples) - start > WINDOW_SAMPLES:
        search = start + WINDOW_SAMPLES - SEARCH_SAMPLES
        cut = search + _quietest(samples[search : start + WINDOW_SAMPLES])
        yield start, cut
        start = cut
    if start < len(samples):
        yield start, len(samples)


def _quietest(samples: Samples) -> int:
    """Return the middle of the interval with the least energy."""
    energy = np.cumsum(np.square(samples, dtype=np.float64))
    stretches = energy[QUIET_SAMPLES:] - energy[:-QUIET_SAMPLES]
    return int(stretches.argmin()) + QUIET_SAMPLES // 2


class _TokenBudget:
    """The remaining tokens; `spent` is set when one more was needed."""

    def __init__(self, tokens: int | None) -> None:
        self.spent = False
        self._left = tokens

    def take(self) -> bool:
        if self._left is not None:
            self.spent = self._left <= 0
            self._left -= 1
        return not self.spent


class _TextJoiner:
    """Joins the windows' text with single blanks; trailing blanks are held until text follows."""

    def __init__(self, on_text: OnText) -> None:
        self.text = ""
        self._on_text = on_text
        self._waiting = ""
        self._fresh = True

    def next_window(self) -> None:
        self._waiting = ""
        self._fresh = True

    def feed(self, piece: str) -> None:
        self._waiting += piece
        if self._fresh:
            self._waiting = self._waiting.lstrip()
        ready = self._waiting.rstrip()
        if not ready:
            return
        self._waiting = self._waiting[len(ready) :]
        if self._fresh and self.text:
            ready = " " + ready
        self._fresh = False
        self.text += ready
        self._on_text(ready)
