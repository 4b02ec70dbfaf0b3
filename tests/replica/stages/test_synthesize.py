import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.stages import synthesize
from omni_proxy.replica.stages.synthesize import (
    MAX_PHONEMES,
    HibariVoice,
    IncrementalSentences,
    MissingVoiceError,
    VoiceError,
    check_speed,
    check_voice,
    voices,
)
from tests.example_counts import examples
from tests.replica.stages.stage_harness import running

hibari = pytest.importorskip("hibari", reason="speech needs omni-proxy[replica]")
pytestmark = pytest.mark.replica
SENTENCES = 'Good morning. The train to London leaves soon! "Will you come?" asked Dr. Smith.'
ALPHABET = st.one_of(st.sampled_from("aB .!?…\n\"”)' 1,"), st.characters())
TEXT = "Good morning. The train leaves soon! Will you come?"
TTS = {"task": "tts"}


@pytest.fixture(scope="module")
def voice():
    return HibariVoice.load()


def sounds_of(voice, text=SENTENCES, **options):
    return [piece.tobytes() for piece in voice.sentences(text, **options)]


@pytest.mark.parametrize("name", ["heart", "default", "alloy", "Nova", " echo "])
def test_every_known_name_means_the_only_voice(name):
    assert check_voice(name) == "heart"


@pytest.mark.parametrize("name", ["emma", "george", "", "../heart"])
def test_a_name_that_the_package_would_download_is_refused(name):
    with pytest.raises(VoiceError, match="choose one of heart, default, alloy"):
        check_voice(name)


def test_the_only_voice_is_in_the_package():
    assert {check_voice(name) for name in voices()} == {"heart"}
    assert hibari.voices.VOICES["heart"]["bundled"]
    # OpenAI's name "fable" means the only voice, not the one that the package would download.
    assert "fable" in hibari.voices.VOICES
    assert check_voice("fable") == "heart"


def test_raised_and_circled_digits_are_spoken_as_digits(voice):
    assert sounds_of(voice, "¹A ⑧.") == sounds_of(voice, "1A 8.")


@pytest.mark.parametrize("speed", [0.24, 4.1, 0, -1, float("nan")])
def test_a_speed_out_of_bounds_is_refused(speed):
    with pytest.raises(VoiceError, match=r"not within 0\.25 and 4"):
        check_speed(speed)


def test_the_error_about_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "hibari", None)
    with pytest.raises(MissingVoiceError, match=r"omni-proxy\[replica\]"):
        HibariVoice.load()


def test_every_sentence_is_one_array_of_sound(voice):
    pieces = list(voice.sentences(SENTENCES))
    assert voice.split(SENTENCES) == SENTENCES.replace("! ", "!|").replace(". The", ".|The").split(
        "|"
    )
    assert len(pieces) == 3
    for piece in pieces:
        assert piece.dtype == np.float32
        assert 0.5 < len(piece) / voice.sample_rate < 10
        assert 0.05 < np.abs(piece).max() <= 1.5


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(voice):
    assert sounds_of(voice, seed=7) == sounds_of(voice, seed=7)
    assert sounds_of(voice, seed=7) != sounds_of(voice, seed=8)


def test_a_negative_seed_is_valid(voice):
    assert sounds_of(voice, seed=-1) == sounds_of(voice, seed=-1)


def test_a_sentence_sounds_the_same_alone_and_in_its_text(voice):
    whole = sounds_of(voice, seed=3)
    separate = [
        piece.tobytes()
        for place, sentence in enumerate(voice.split(SENTENCES))
        for piece in voice.synthesize(sentence, seed=3, place=place)
    ]
    assert separate == whole


def test_a_repeated_sentence_has_other_noise(voice):
    first, second = sounds_of(voice, "Hello there. Hello there.")
    assert first != second


@pytest.mark.parametrize("speed", [0.25, 0.5, 2.0, 4.0])
def test_the_duration_follows_the_speed(voice, speed):
    normal = sum(len(piece) for piece in voice.sentences(SENTENCES))
    changed = sum(len(piece) for piece in voice.sentences(SENTENCES, speed=speed))
    assert 0.8 < changed * speed / normal < 1.25


def test_text_without_a_pronunciation_gives_no_audio(voice):
    assert sounds_of(voice, "你好") == sounds_of(voice, " \n ") == []


def test_a_long_sentence_is_synthesized_in_chunks(voice):
    words = "one two three four five six seven eight nine ten " * 20
    assert len(voice.split(words)) == 1
    pieces = list(voice.sentences(words))
    assert len(pieces) > 2
    assert max(len(piece) for piece in pieces) < MAX_PHONEMES * 0.2 * voice.sample_rate


@given(st.text(ALPHABET, max_size=60), st.data())
@settings(max_examples=examples(300))
def test_the_sentences_of_a_stream_are_those_of_the_whole_text(text, data):
    splitter = IncrementalSentences(hibari.Hibari.split_sentences)
    sentences, rest = [], text
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        sentences += splitter.feed(rest[:length])
        rest = rest[length:]
    assert sentences + splitter.flush() == hibari.Hibari.split_sentences(text)
    assert splitter.flush() == []


def test_a_sentence_is_returned_when_the_next_one_begins():
    splitter = IncrementalSentences(hibari.Hibari.split_sentences)
    returned = [
        splitter.feed(piece) for piece in ["Hel", "lo.", " ", "How", " are", " you?\n", "F"]
    ]
    assert returned == [[], [], [], ["Hello."], [], [], ["How are you?"]]
    assert splitter.flush() == ["F"]


@given(st.text(ALPHABET, max_size=20))
@settings(max_examples=examples(40))
def test_no_text_breaks_the_voice(voice, text):
    assert all(np.isfinite(piece).all() for piece in voice.sentences(text))


@pytest.fixture
def stage(voice):
    with running(synthesize.make_stage("speak", voice)) as stage:
        yield stage


def samples(chunk):
    return np.frombuffer(chunk["audio_data"], "<f4")


def test_every_sentence_is_streamed_and_the_result_has_all(stage, voice):
    chunks, end = stage.ask(TEXT, **TTS)
    assert [samples(chunk).tolist() for chunk in chunks] == [
        piece.tolist() for piece in voice.sentences(TEXT)
    ]
    assert {(chunk["sample_rate"], chunk["modality"]) for chunk in chunks} == {(24_000, "audio")}
    assert end.data["audio_data"] == b"".join(chunk["audio_data"] for chunk in chunks)
    assert end.data["finish_reason"] == "stop"
    assert end.data["engine_time_s"] > 0


def test_usage_counts_words_and_frames(stage):
    _, end = stage.ask(TEXT, **TTS)
    frames = round(len(samples(end.data)) / 24_000 / 0.0125)
    assert end.data["duration"] == len(samples(end.data)) / 24_000
    assert end.data["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": frames,
        "total_tokens": 9 + frames,
    }


def test_a_text_that_is_being_generated_is_spoken_sentence_by_sentence(stage):
    whole, end = stage.ask(TEXT, **TTS)
    stage.submit("r", {"messages": []}, fed=True, task="chat")
    stage.stream_open("r", "Good mor", "ning. The", " train")
    first = stage.next()
    assert first.chunk == whole[0]
    stage.stream("r", " leaves soon! Will", " you come", "?")
    assert [stage.next().chunk for _ in whole[1:]] == whole[1:]
    assert stage.next().data["audio_data"] == end.data["audio_data"]


def test_an_empty_text_of_a_chat_gives_no_audio_and_no_error(stage):
    chunks, end = stage.ask({"messages": []}, "", task="chat")
    assert chunks == []
    assert end.data["audio_data"] == b""
    assert end.data["usage"]["total_tokens"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"tts_params": {"seed": 5, "speed": 1.5}},
        {"audio": {"seed": 5, "speed": 1.5, "voice": "alloy"}},
        {"params": {"stage_params": {"speak": {"seed": 5, "speed": 1.5}, "other": {"seed": 9}}}},
        {"params": {"seed": 5}, "tts_params": {"speed": 1.5, "seed": None}},
    ],
)
def test_speed_and_seed_may_be_given_in_several_places(stage, voice, options):
    _, end = stage.ask(TEXT, task="tts", **options)
    expected = b"".join(piece.tobytes() for piece in voice.sentences(TEXT, speed=1.5, seed=5))
    assert end.data["audio_data"] == expected


def test_references_of_a_text_are_ignored(stage):
    _, plain = stage.ask(TEXT, **TTS)
    _, with_references = stage.ask({"text": TEXT, "references": []}, **TTS)
    assert with_references.data["audio_data"] == plain.data["audio_data"]


@pytest.mark.parametrize(
    ("inputs", "params", "reason"),
    [
        (TEXT, {"voice": "emma"}, "there is no voice 'emma'"),
        (TEXT, {"speed": 5}, "speed 5.0 is not within"),
        (TEXT, {"speed": "fast"}, "speed or seed is not a number"),
        (TEXT, {"seed": [1]}, "speed or seed is not a number"),
        ("你好", {}, "nothing that can be synthesized"),
        ("", {}, "nothing that can be synthesized"),
        (5, {}, "no text to synthesize"),
        ({"messages": []}, {}, "no text to synthesize"),
    ],
)
def test_a_request_that_cannot_be_synthesized_is_an_error_of_the_caller(
    stage, inputs, params, reason
):
    kind, error = stage.fault(inputs, task="tts", tts_params=params)
    assert kind == "caller"
    assert reason in error


class SlowVoice:
    """The voice, blocked after the first sentence until the test releases it."""

    def __init__(self, voice):
        self.sample_rate, self.split, self._voice = voice.sample_rate, voice.split, voice
        self.spoken, self.may_continue, self.is_blocked = [], threading.Event(), threading.Event()

    def synthesize(self, sentence, **options):
        if self.spoken:
            self.is_blocked.set()
            assert self.may_continue.wait(30)
        self.spoken.append(sentence)
        yield from self._voice.synthesize(sentence, **options)


def test_an_aborted_request_synthesizes_no_further_sentence(voice):
    slow = SlowVoice(voice)
    with running(synthesize.make_stage("speak", slow)) as stage:
        stage.submit("aborted", TEXT, **TTS)
        assert stage.next().request_id == "aborted"
        assert slow.is_blocked.wait(30)
        stage.abort("aborted")
        stage.submit("next", "Hello.", **TTS)
        stage.settle()
        slow.may_continue.set()
        assert [stage.next().request_id for _ in range(2)] == ["next", "next"]
    assert slow.spoken == ["Good morning.", "The train leaves soon!", "Hello."]


def test_the_stage_loads_its_own_voice():
    with running(synthesize.build("speak")) as stage:
        chunks, _ = stage.ask("Hello.", **TTS)
        assert len(chunks) == 1
