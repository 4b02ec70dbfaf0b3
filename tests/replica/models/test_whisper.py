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
    not FILE.exists(), reason=f"{FILE} is not there: omni-proxy replica fetch whisper-tiny"
)
SENTENCES = [
    "What is the capital of France?",
    "Good morning. The train to London leaves soon. Will you come along with us, my old friend?",
]


@pytest.fixture(scope="module")
def net():
    return WhisperNet(variables())


@pytest.fixture(scope="module")
def heard(net):
    mel = torch.randn(80, 3000, generator=torch.Generator().manual_seed(1))
    return lambda: net.encode(mel)


@pytest.fixture(scope="module")
def small():
    return Whisper(small_whisper())


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=12), st.data())
@settings(max_examples=examples(20))
def test_tokens_one_by_one_get_the_scores_they_get_at_once(net, heard, tokens, data):
    at_once = net.decode(tokens, heard())
    decoding, scores, rest = heard(), [], tokens
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        scores.append(net.decode(rest[:length], decoding))
        rest = rest[length:]
    assert decoding.length == len(tokens)
    torch.testing.assert_close(torch.cat(scores), at_once, atol=1e-4, rtol=1e-4)


def test_a_token_is_not_seen_by_those_before_it(net, heard):
    one, other = net.decode([1, 2, 3], heard()), net.decode([1, 2, 9], heard())
    torch.testing.assert_close(one[:2], other[:2])
    assert not torch.allclose(one[2], other[2])


def naive_attention(queries, keys, values):
    """One head after the other, one query after the other."""
    size = WIDTH // HEADS
    mixed = torch.zeros(len(queries), WIDTH)
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        for place, query in enumerate(queries[:, part]):
            weights = torch.softmax(keys[:, part] @ query / size**0.5, 0)
            mixed[place, part] = weights @ values[:, part]
    return mixed


class Naive:
    """The same network by its definition, computed from the variables."""

    def __init__(self, made):
        self.made = {name: torch.from_numpy(np.asarray(each, "f4")) for name, each in made.items()}

    def linear(self, state, name):
        return state @ self.made[f"{name}/weight"].T + self.made[f"{name}/bias"]

    def normed(self, state, name):
        gamma, beta = self.made[f"{name}/layer_norm/gamma"], self.made[f"{name}/layer_norm/beta"]
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
            weight, bias = (self.made[f"encoder/{name}/{part}"] for part in ("weight", "bias"))
            state = F.gelu(F.conv1d(state, weight, bias, stride, padding=1))
        state = state[0].T + self.made["encoder/position_encodings/encodings"]
        for layer in ("encoder/layer_0", "encoder/layer_1"):
            state = self.feed_forward(self.self_attention(state, layer, causal=False), layer)
        return self.normed(state, "encoder")

    def decoder(self, tokens, heard):
        """Return the scores after the last token."""
        embedding = self.made["decoder/embeddings/weight"]
        state = embedding[tokens]
        state = state + self.made["decoder/position_encodings/encodings"][: len(tokens)]
        for layer in ("decoder/layer_0", "decoder/layer_1"):
            state = self.self_attention(state, layer, causal=True)
            queries = self.linear(
                self.normed(state, f"{layer}/attention"), f"{layer}/attention/linear_0"
            )
            keys, values = self.linear(heard, f"{layer}/attention/linear_1").split(WIDTH, dim=1)
            mixed = naive_attention(queries, keys, values)
            state = state + self.linear(mixed, f"{layer}/attention/linear_2")
            state = self.feed_forward(state, layer)
        return self.normed(state, "decoder")[-1] @ embedding.T


def test_the_network_computes_its_definition(net):
    mel = torch.randn(80, 3000, generator=torch.Generator().manual_seed(1))
    naive = Naive(variables())
    expected = naive.decoder([4, 7, 1], naive.encoder(mel))
    scores = net.decode([4, 7, 1], net.encode(mel))[-1]
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(WhisperFileError, match="differs from Whisper in decoder/pre_norm"):
        WhisperNet(variables() | {"decoder/pre_norm": np.int8(0)})
    with pytest.raises(WhisperFileError, match="has no 'encoder/num_heads'"):
        WhisperNet({name: each for name, each in variables().items() if "num_heads" not in name})


def test_words_that_do_not_fit_the_model_are_refused():
    with pytest.raises(WhisperFileError, match=r"43 tokens do not fit a model of 44"):
        Whisper(WhisperFile(variables(), VOCABULARY[1:], (), ()))
    renamed = (*VOCABULARY[:-1], "x")
    with pytest.raises(WhisperFileError, match=r"lacks '<\|notimestamps\|>'"):
        Whisper(WhisperFile(variables(), renamed, (), ()))


def test_a_file_that_was_not_fetched_is_reported_with_the_cure(tmp_path):
    with pytest.raises(WhisperFileError, match="omni-proxy replica fetch whisper-tiny"):
        Whisper.load(tmp_path / "model.bin")


@given(st.integers(0, 100 * RATE))
@settings(max_examples=examples(15))
def test_windows_together_are_the_whole_sound(length):
    found = list(windows(np.resize(NOISE, length)))
    assert [start for start, _ in found[1:]] == [end for _, end in found[:-1]]
    assert all(0 < end - start <= WINDOW_SAMPLES for start, end in found)
    assert (found[0][0], found[-1][1]) == (0, length) if found else length == 0


def test_a_long_sound_is_cut_where_it_is_quiet():
    samples = NOISE.copy()
    samples[int(24.0 * RATE) : int(24.3 * RATE)] = 0
    (_, cut), *_ = windows(samples)
    assert 24.0 < cut / RATE < 24.3


def test_the_pieces_add_up_to_the_text_and_the_segments_hold_it(small):
    pieces = []
    transcript = small.transcribe(NOISE[: 65 * RATE], pieces.append)
    assert len(pieces) > 2
    assert "".join(pieces) == transcript.text == transcript.text.strip()
    assert " ".join(segment.text for segment in transcript.segments) == transcript.text
    assert transcript.duration_secs == 65
    assert [segment.end for segment in transcript.segments][-1] == 65
    assert transcript == small.transcribe(NOISE[: 65 * RATE])


def test_no_token_is_emitted_that_must_not_be(small):
    free = small.transcribe(NOISE[: 2 * RATE]).text.split()
    first, other = VOCABULARY.index("Ġ" + free[0]), next(w for w in free if w != free[0])
    assert free.count(free[0]) > 1
    held = Whisper(small_whisper((VOCABULARY.index("Ġ" + other),), (first,)))
    text = held.transcribe(NOISE[: 2 * RATE]).text.split()
    assert other not in text
    assert text[0] != free[0]
    assert free[0] in text


def test_different_sounds_have_different_texts(small):
    texts = {small.transcribe(NOISE[n * RATE : (n + 2) * RATE]).text for n in range(3)}
    assert len(texts) == 3


def test_silence_has_no_text(small):
    pieces = []
    transcript = small.transcribe(np.full(40 * RATE, 1e-4, np.float32), pieces.append)
    assert (transcript.text, transcript.segments, pieces) == ("", (), [])
    assert transcript.duration_secs == 40
    assert small.transcribe(np.zeros(0, np.float32)).duration_secs == 0


def test_a_window_ends_at_its_bounds(small, monkeypatch):
    monkeypatch.setattr(whisper, "MAX_WINDOW_TOKENS", 5)
    assert len(small.transcribe(NOISE[: 2 * RATE]).text.split()) <= 5


def test_a_transcription_can_be_aborted_after_any_token(small):
    whole = small.transcribe(NOISE[: 40 * RATE]).text
    pieces = []
    partly = small.transcribe(NOISE[: 40 * RATE], pieces.append, lambda: len(pieces) >= 2)
    assert len(pieces) == 2
    assert whole.startswith(partly.text)
    assert len(partly.text) < len(whole)
    assert small.transcribe(NOISE, aborted=lambda: True).text == ""


def test_a_bound_on_the_tokens_counts_all_windows(small):
    whole = small.transcribe(NOISE[: 40 * RATE])
    first, last = (len(segment.text.split()) for segment in whole.segments)
    partly = small.transcribe(NOISE[: 40 * RATE], most_tokens=first + 1)
    assert partly.text.split() == whole.text.split()[: first + 1]
    assert partly.cut
    enough = small.transcribe(NOISE[: 40 * RATE], most_tokens=first + last)
    assert enough == whole
    assert not whole.cut
    assert small.transcribe(NOISE[:RATE], most_tokens=0).text == ""


@given(pieces_of_windows)
def test_windows_are_joined_by_one_blank(message):
    reported = []
    pieces = whisper._TextJoiner(reported.append)
    for window in message:
        pieces.next_window()
        for piece in window:
            pieces.feed(piece)
    texts = [text for window in message if (text := "".join(window).strip())]
    assert pieces.text == "".join(reported) == " ".join(texts)
    assert "" not in reported


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
def test_a_held_tone_does_not_keep_the_decoder_going_round(tiny_en):
    tone = np.sin(2 * np.pi * 440 * np.arange(5 * RATE) / RATE).astype(np.float32) * 0.3
    pieces = []
    tiny_en.transcribe(tone, pieces.append)
    assert len(pieces) <= whisper.STUCK_TOKENS
