import threading

import numpy as np
import pytest

from omni_proxy.replica.models.hibari import HibariVoice
from omni_proxy.replica.stages import synthesize
from tests.replica.stages.stage_harness import running

pytest.importorskip("hibari", reason="speech needs omni-proxy[replica]")
pytestmark = pytest.mark.replica

TEXT = "Good morning. The train leaves soon! Will you come?"
TTS = {"task": "tts"}


@pytest.fixture(scope="module")
def voice():
    return HibariVoice.load()


@pytest.fixture
def stage(voice):
    with running(synthesize.make_stage("speak", voice)) as stage:
        yield stage


def samples(chunk):
    return np.frombuffer(chunk["audio_data"], "<f4")


def test_every_sentence_is_streamed_and_the_result_holds_them_all(stage, voice):
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


def test_an_answer_that_is_still_written_is_spoken_sentence_by_sentence(stage):
    whole, end = stage.ask(TEXT, **TTS)
    stage.submit("r", {"messages": []}, fed=True, task="chat")
    stage.stream_open("r", "Good mor", "ning. The", " train")
    first = stage.next()
    assert first.chunk == whole[0]
    stage.stream("r", " leaves soon! Will", " you come", "?")
    assert [stage.next().chunk for _ in whole[1:]] == whole[1:]
    assert stage.next().data["audio_data"] == end.data["audio_data"]


def test_an_answer_without_words_is_silence_and_no_fault(stage):
    chunks, end = stage.ask({"messages": []}, "", task="chat")
    assert chunks == []
    assert end.data["audio_data"] == b""
    assert end.data["usage"]["total_tokens"] == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"tts_params": {"seed": 5, "speed": 1.5}},
        {"audio": {"seed": 5, "speed": 1.5, "voice": "alloy"}},
        {"params": {"stage_params": {"speak": {"seed": 5, "speed": 1.5}, "other": {"seed": 9}}}},
        {"params": {"seed": 5}, "tts_params": {"speed": 1.5, "seed": None}},
    ],
)
def test_speed_and_seed_are_found_wherever_they_stand(stage, voice, asked):
    _, end = stage.ask(TEXT, task="tts", **asked)
    expected = b"".join(each.tobytes() for each in voice.sentences(TEXT, speed=1.5, seed=5))
    assert end.data["audio_data"] == expected


def test_references_of_a_text_are_ignored(stage):
    _, plain = stage.ask(TEXT, **TTS)
    _, with_references = stage.ask({"text": TEXT, "references": []}, **TTS)
    assert with_references.data["audio_data"] == plain.data["audio_data"]


@pytest.mark.parametrize(
    ("inputs", "asked", "reason"),
    [
        (TEXT, {"voice": "emma"}, "there is no voice 'emma'"),
        (TEXT, {"speed": 5}, "speed 5.0 is not within"),
        (TEXT, {"speed": "fast"}, "speed or seed is no number"),
        (TEXT, {"seed": [1]}, "speed or seed is no number"),
        ("你好", {}, "nothing that can be spoken"),
        ("", {}, "nothing that can be spoken"),
        (5, {}, "no text to speak"),
        ({"messages": []}, {}, "no text to speak"),
    ],
)
def test_what_cannot_be_spoken_is_the_callers_fault(stage, inputs, asked, reason):
    kind, error = stage.fault(inputs, task="tts", tts_params=asked)
    assert kind == "caller"
    assert reason in error


class SlowVoice:
    """The voice, held after the first sentence until it is let go."""

    def __init__(self, voice):
        self.sample_rate, self.split, self._voice = voice.sample_rate, voice.split, voice
        self.spoken, self.go_on, self.held = [], threading.Event(), threading.Event()

    def speak(self, sentence, **how):
        if self.spoken:
            self.held.set()
            assert self.go_on.wait(30)
        self.spoken.append(sentence)
        yield from self._voice.speak(sentence, **how)


def test_an_aborted_request_speaks_no_further_sentence(voice):
    slow = SlowVoice(voice)
    with running(synthesize.make_stage("speak", slow)) as stage:
        stage.submit("gone", TEXT, **TTS)
        assert stage.next().request_id == "gone"
        assert slow.held.wait(30)
        stage.abort("gone")
        stage.submit("next", "Hello.", **TTS)
        stage.settle()
        slow.go_on.set()
        assert [stage.next().request_id for _ in range(2)] == ["next", "next"]
    assert slow.spoken == ["Good morning.", "The train leaves soon!", "Hello."]


def test_the_stage_loads_its_own_voice():
    with running(synthesize.build("speak")) as stage:
        chunks, _ = stage.ask("Hello.", **TTS)
        assert len(chunks) == 1
