import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.models.hibari import (
    MAX_PHONEMES,
    HibariVoice,
    IncrementalSentences,
    MissingVoiceError,
    VoiceError,
    check_speed,
    check_voice,
    voices,
)

hibari = pytest.importorskip("hibari", reason="speech needs omni-proxy[replica]")
pytestmark = pytest.mark.replica
TEXT = 'Good morning. The train to London leaves soon! "Will you come?" asked Dr. Smith.'


@pytest.fixture(scope="module")
def voice():
    return HibariVoice.load()


def spoken(voice, text=TEXT, **how):
    return [piece.tobytes() for piece in voice.sentences(text, **how)]


@pytest.mark.parametrize("name", ["heart", "default", "alloy", "Nova", " echo "])
def test_every_known_name_means_the_one_voice(name):
    assert check_voice(name) == "heart"


@pytest.mark.parametrize("name", ["emma", "george", "", "../heart"])
def test_a_name_that_the_package_would_download_is_refused(name):
    with pytest.raises(VoiceError, match="choose one of heart, default, alloy"):
        check_voice(name)


def test_the_one_voice_lies_in_the_package():
    assert {check_voice(name) for name in voices()} == {"heart"}
    assert hibari.voices.VOICES["heart"]["bundled"]
    # OpenAI has a voice of the same name as one that would be downloaded: it means the one voice.
    assert "fable" in hibari.voices.VOICES
    assert check_voice("fable") == "heart"


def test_raised_and_circled_digits_are_spoken_as_digits(voice):
    assert spoken(voice, "¹A ⑧.") == spoken(voice, "1A 8.")


@pytest.mark.parametrize("speed", [0.24, 4.1, 0, -1, float("nan")])
def test_a_speed_out_of_bounds_is_refused(speed):
    with pytest.raises(VoiceError, match=r"not within 0\.25 and 4"):
        check_speed(speed)


def test_a_missing_package_is_reported_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "hibari", None)
    with pytest.raises(MissingVoiceError, match=r"omni-proxy\[replica\]"):
        HibariVoice.load()


def test_every_sentence_is_one_array_of_sound(voice):
    pieces = list(voice.sentences(TEXT))
    assert voice.split(TEXT) == TEXT.replace("! ", "!|").replace(". The", ".|The").split("|")
    assert len(pieces) == 3
    for piece in pieces:
        assert piece.dtype == np.float32
        assert 0.5 < len(piece) / voice.sample_rate < 10
        assert 0.05 < np.abs(piece).max() <= 1.5


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(voice):
    assert spoken(voice, seed=7) == spoken(voice, seed=7)
    assert spoken(voice, seed=7) != spoken(voice, seed=8)


def test_a_negative_seed_is_a_seed(voice):
    assert spoken(voice, seed=-1) == spoken(voice, seed=-1)


def test_a_sentence_sounds_the_same_alone_and_within_its_text(voice):
    whole = spoken(voice, seed=3)
    alone = [
        piece.tobytes()
        for place, sentence in enumerate(voice.split(TEXT))
        for piece in voice.speak(sentence, seed=3, place=place)
    ]
    assert alone == whole


def test_a_repeated_sentence_has_other_noise(voice):
    first, second = spoken(voice, "Hello there. Hello there.")
    assert first != second


@pytest.mark.parametrize("speed", [0.25, 0.5, 2.0, 4.0])
def test_the_duration_follows_the_speed(voice, speed):
    usual = sum(len(piece) for piece in voice.sentences(TEXT))
    changed = sum(len(piece) for piece in voice.sentences(TEXT, speed=speed))
    assert 0.8 < changed * speed / usual < 1.25


def test_what_has_no_pronunciation_is_silence_of_no_length(voice):
    assert spoken(voice, "你好") == spoken(voice, " \n ") == []


def test_a_long_sentence_is_synthesized_in_chunks(voice):
    words = "one two three four five six seven eight nine ten " * 20
    assert len(voice.split(words)) == 1
    pieces = list(voice.sentences(words))
    assert len(pieces) > 2
    assert max(len(piece) for piece in pieces) < MAX_PHONEMES * 0.2 * voice.sample_rate


ALPHABET = st.one_of(st.sampled_from("aB .!?…\n\"”)' 1,"), st.characters())


@given(st.text(ALPHABET, max_size=60), st.data())
@settings(max_examples=300)
def test_sentences_of_a_stream_are_those_of_the_whole_text(text, data):
    cutter = IncrementalSentences(hibari.Hibari.split_sentences)
    found, rest = [], text
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        found += cutter.feed(rest[:length])
        rest = rest[length:]
    assert found + cutter.flush() == hibari.Hibari.split_sentences(text)
    assert cutter.flush() == []


def test_a_sentence_is_given_back_when_the_next_one_begins():
    cutter = IncrementalSentences(hibari.Hibari.split_sentences)
    given_back = [
        cutter.feed(piece) for piece in ["Hel", "lo.", " ", "How", " are", " you?\n", "F"]
    ]
    assert given_back == [[], [], [], ["Hello."], [], [], ["How are you?"]]
    assert cutter.flush() == ["F"]


@given(st.text(ALPHABET, max_size=20))
@settings(max_examples=40, deadline=None)
def test_no_text_breaks_the_voice(voice, text):
    assert all(np.isfinite(piece).all() for piece in voice.sentences(text))
