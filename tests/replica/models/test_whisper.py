import os
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.audio import resample
from omni_proxy.replica.model_file import MODELS, cache_folder
from omni_proxy.replica.models import whisper
from omni_proxy.replica.models.whisper import Whisper, windows
from omni_proxy.replica.models.whisper_net import (
    RATE,
    WINDOW_SAMPLES,
    WhisperFile,
    WhisperFileError,
    WhisperNet,
)
from omni_proxy.replica.stages.synthesize import HibariVoice
from tests.example_counts import examples
from tests.replica.models.small_whisper import (
    HEADS,
    VOCABULARY,
    WIDTH,
    small_whisper,
    variables,
)

FILE = cache_folder(os.environ) / MODELS["whisper-tiny"].file
NOISE = (np.random.default_rng(3).standard_normal(70 * RATE) * 0.1).astype(np.float32)
pieces_of_windows = st.lists(
    st.lists(st.sampled_from([" ", "a", " b", "c ", "\n", ""])), max_size=5
)
needs_file = pytest.mark.skipif(
    not FILE.exists(), reason=f"{FILE} is missing: omni-proxy replica fetch whisper-tiny"
)
SENTENCES = [
    "What is the capital of France?",
    "Good morning. The train to London leaves soon. Will you come along with us, my old friend?",
]


@pytest.fixture(scope="module")
def net():
    return WhisperNet(variables())


@pytest.fixture(scope="module")
def start_decoding(net):
    mel = torch.randn(80, 3000, generator=torch.Generator().manual_seed(1))
    return lambda: net.encode(mel)


@pytest.fixture(scope="module")
def small():
    return Whisper(small_whisper())


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=12), st.data())
@settings(max_examples=examples(20))
def test_scores_do_not_depend_on_how_the_tokens_are_chunked(net, start_decoding, tokens, data):
    at_once = net.decode(tokens, start_decoding())
    decoding, scores, rest = start_decoding(), [], tokens
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        scores.append(net.decode(rest[:length], decoding))
        rest = rest[length:]
    assert decoding.length == len(tokens)
    torch.testing.assert_close(torch.cat(scores), at_once, atol=1e-4, rtol=1e-4)


def test_no_position_attends_to_a_later_one(net, start_decoding):
    first, second = net.decode([1, 2, 3], start_decoding()), net.decode([1, 2, 9], start_decoding())
    torch.testing.assert_close(first[:2], second[:2])
    assert not torch.allclose(first[2], second[2])


def naive_attention(queries, keys, values):
    """Attention computed for each head and each query separately."""
    size = WIDTH // HEADS
    attended = torch.zeros(len(queries), WIDTH)
    for head in range(HEADS):
        features = slice(head * size, (head + 1) * size)
        for index, query in enumerate(queries[:, features]):
            weights = torch.softmax(keys[:, features] @ query / size**0.5, 0)
            attended[index, features] = weights @ values[:, features]
    return attended


class Naive:
    """A naive implementation of the same network, computed from its variables."""

    def __init__(self, weights):
        self.weights = {
            name: torch.from_numpy(np.asarray(weight, "f4")) for name, weight in weights.items()
        }

    def linear(self, state, name):
        return state @ self.weights[f"{name}/weight"].T + self.weights[f"{name}/bias"]

    def normed(self, state, name):
        gamma, beta = (
            self.weights[f"{name}/layer_norm/gamma"],
            self.weights[f"{name}/layer_norm/beta"],
        )
        return F.layer_norm(state, (WIDTH,), gamma, beta)

    def self_attention(self, state, layer, *, causal):
        fused = self.linear(
            self.normed(state, f"{layer}/self_attention"), f"{layer}/self_attention/linear_0"
        )
        queries, keys, values = fused.split(WIDTH, dim=1)
        if causal:
            rows = [
                naive_attention(queries[n : n + 1], keys[: n + 1], values[: n + 1])
                for n in range(len(state))
            ]
            mixed = torch.cat(rows)
        else:
            mixed = naive_attention(queries, keys, values)
        return state + self.linear(mixed, f"{layer}/self_attention/linear_1")

    def feed_forward(self, state, layer):
        inside = F.gelu(self.linear(self.normed(state, f"{layer}/ffn"), f"{layer}/ffn/linear_0"))
        return state + self.linear(inside, f"{layer}/ffn/linear_1")

    def encoder(self, mel):
        state = mel[None]
        for name, stride in (("conv1", 1), ("conv2", 2)):
            weight, bias = (self.weights[f"encoder/{name}/{part}"] for part in ("weight", "bias"))
            state = F.gelu(F.conv1d(state, weight, bias, stride, padding=1))
        state = state[0].T + self.weights["encoder/position_encodings/encodings"]
        for layer in ("encoder/layer_0", "encoder/layer_1"):
            state = self.feed_forward(self.self_attention(state, layer, causal=False), layer)
        return self.normed(state, "encoder")

    def decoder(self, tokens, encoded_audio):
        """Return the scores after the last token."""
        embedding = self.weights["decoder/embeddings/weight"]
        state = embedding[tokens]
        state = state + self.weights["decoder/position_encodings/encodings"][: len(tokens)]
        for layer in ("decoder/layer_0", "decoder/layer_1"):
            state = self.self_attention(state, layer, causal=True)
            queries = self.linear(
                self.normed(state, f"{layer}/attention"), f"{layer}/attention/linear_0"
            )
            keys, values = self.linear(encoded_audio, f"{layer}/attention/linear_1").split(
                WIDTH, dim=1
            )
            mixed = naive_attention(queries, keys, values)
            state = state + self.linear(mixed, f"{layer}/attention/linear_2")
            state = self.feed_forward(state, layer)
        return self.normed(state, "decoder")[-1] @ embedding.T


def test_the_scores_match_a_naive_implementation(net):
    mel = torch.randn(80, 3000, generator=torch.Generator().manual_seed(1))
    naive = Naive(variables())
    expected = naive.decoder([4, 7, 1], naive.encoder(mel))
    scores = net.decode([4, 7, 1], net.encode(mel))[-1]
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(WhisperFileError, match="differs from Whisper in decoder/pre_norm"):
        WhisperNet(variables() | {"decoder/pre_norm": np.int8(0)})
    with pytest.raises(WhisperFileError, match="has no 'encoder/num_heads'"):
        WhisperNet({name: value for name, value in variables().items() if "num_heads" not in name})


def test_a_vocabulary_that_does_not_fit_the_model_is_refused():
    with pytest.raises(WhisperFileError, match=r"43 tokens do not fit a model of 44"):
        Whisper(WhisperFile(variables(), VOCABULARY[1:], (), ()))
    renamed = (*VOCABULARY[:-1], "x")
    with pytest.raises(WhisperFileError, match=r"lacks '<\|notimestamps\|>'"):
        Whisper(WhisperFile(variables(), renamed, (), ()))


def test_the_error_for_a_missing_file_names_the_fetch_command(tmp_path):
    with pytest.raises(WhisperFileError, match="omni-proxy replica fetch whisper-tiny"):
        Whisper.load(tmp_path / "model.bin")


@given(st.integers(0, 100 * RATE))
@settings(max_examples=examples(15))
def test_windows_cover_the_audio_without_gaps(length):
    split = list(windows(np.resize(NOISE, length)))
    assert [start for start, _ in split[1:]] == [end for _, end in split[:-1]]
    assert all(0 < end - start <= WINDOW_SAMPLES for start, end in split)
    assert (split[0][0], split[-1][1]) == (0, length) if split else length == 0


def test_long_audio_is_split_where_it_is_quiet():
    samples = NOISE.copy()
    samples[int(24.0 * RATE) : int(24.3 * RATE)] = 0
    (_, cut), *_ = windows(samples)
    assert 24.0 < cut / RATE < 24.3


def test_the_pieces_and_the_segments_add_up_to_the_text(small):
    pieces = []
    transcript = small.transcribe(NOISE[: 65 * RATE], pieces.append)
    assert len(pieces) > 2
    assert "".join(pieces) == transcript.text == transcript.text.strip()
    assert " ".join(segment.text for segment in transcript.segments) == transcript.text
    assert transcript.duration_secs == 65
    assert [segment.end for segment in transcript.segments][-1] == 65
    assert transcript == small.transcribe(NOISE[: 65 * RATE])


def test_suppressed_tokens_are_not_emitted(small):
    unsuppressed = small.transcribe(NOISE[: 2 * RATE]).text.split()
    first, other = (
        VOCABULARY.index("Ġ" + unsuppressed[0]),
        next(word for word in unsuppressed if word != unsuppressed[0]),
    )
    assert unsuppressed.count(unsuppressed[0]) > 1
    suppressing = Whisper(small_whisper((VOCABULARY.index("Ġ" + other),), (first,)))
    text = suppressing.transcribe(NOISE[: 2 * RATE]).text.split()
    assert other not in text
    assert text[0] != unsuppressed[0]
    assert unsuppressed[0] in text


def test_different_audio_has_different_text(small):
    texts = {small.transcribe(NOISE[n * RATE : (n + 2) * RATE]).text for n in range(3)}
    assert len(texts) == 3


def test_silence_has_no_text(small):
    pieces = []
    transcript = small.transcribe(np.full(40 * RATE, 1e-4, np.float32), pieces.append)
    assert (transcript.text, transcript.segments, pieces) == ("", (), [])
    assert transcript.duration_secs == 40
    assert small.transcribe(np.zeros(0, np.float32)).duration_secs == 0


def test_a_window_has_a_limited_number_of_tokens(small, monkeypatch):
    monkeypatch.setattr(whisper, "MAX_WINDOW_TOKENS", 5)
    assert len(small.transcribe(NOISE[: 2 * RATE]).text.split()) <= 5


def test_a_transcription_can_be_aborted_after_any_token(small):
    complete = small.transcribe(NOISE[: 40 * RATE]).text
    pieces = []
    aborted = small.transcribe(NOISE[: 40 * RATE], pieces.append, lambda: len(pieces) >= 2)
    assert len(pieces) == 2
    assert complete.startswith(aborted.text)
    assert len(aborted.text) < len(complete)
    assert small.transcribe(NOISE, aborted=lambda: True).text == ""


def test_the_token_limit_counts_the_tokens_of_all_windows(small):
    complete = small.transcribe(NOISE[: 40 * RATE])
    first, last = (len(segment.text.split()) for segment in complete.segments)
    limited = small.transcribe(NOISE[: 40 * RATE], max_tokens=first + 1)
    assert limited.text.split() == complete.text.split()[: first + 1]
    assert limited.cut
    exact = small.transcribe(NOISE[: 40 * RATE], max_tokens=first + last)
    assert exact == complete
    assert not complete.cut
    assert small.transcribe(NOISE[:RATE], max_tokens=0).text == ""


@given(pieces_of_windows)
def test_texts_of_windows_are_joined_by_one_space(window_pieces):
    emitted = []
    joiner = whisper._TextJoiner(emitted.append)
    for window in window_pieces:
        joiner.next_window()
        for piece in window:
            joiner.feed(piece)
    texts = [text for window in window_pieces if (text := "".join(window).strip())]
    assert joiner.text == "".join(emitted) == " ".join(texts)
    assert "" not in emitted


@pytest.fixture(scope="module")
def tiny_en():
    return Whisper.load()


@pytest.fixture(scope="module")
def voice():
    pytest.importorskip("hibari")
    return HibariVoice.load()


def plain(text):
    return re.sub(r"[^a-z ]", "", text.lower())


def spoken(voice, text):
    return resample(np.concatenate(list(voice.sentences(text))), voice.sample_rate, RATE)


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.replica
@needs_file
def test_speech_of_hibari_is_transcribed_word_for_word(voice, tiny_en, sentence):
    pieces = []
    transcript = tiny_en.transcribe(spoken(voice, sentence), pieces.append)
    assert plain(transcript.text) == plain(sentence)
    assert len(pieces) >= len(sentence.split())


@pytest.mark.replica
@needs_file
def test_words_beyond_the_first_window_are_transcribed(voice, tiny_en):
    first = spoken(voice, "The first window begins here.")
    last = spoken(voice, "The last window ends there.")
    samples = np.concatenate([first, np.zeros(28 * RATE, np.float32), last])
    transcript = tiny_en.transcribe(samples)
    assert plain(transcript.text) == "the first window begins here the last window ends there"
    assert [plain(segment.text) for segment in transcript.segments] == [
        "the first window begins here",
        "the last window ends there",
    ]


@pytest.mark.replica
@needs_file
def test_noise_without_words_has_no_text(tiny_en):
    assert tiny_en.transcribe(NOISE[: 3 * RATE]).text == ""


@pytest.mark.replica
@needs_file
def test_a_constant_tone_does_not_make_the_decoder_loop(tiny_en):
    tone = np.sin(2 * np.pi * 440 * np.arange(5 * RATE) / RATE).astype(np.float32) * 0.3
    pieces = []
    tiny_en.transcribe(tone, pieces.append)
    assert len(pieces) <= whisper.STUCK_TOKENS
