import os
import threading

import numpy as np
import pytest

from omni_proxy.replica.audio import encode_wav, resample
from omni_proxy.replica.model_file import MODELS, cache_folder
from omni_proxy.replica.models.whisper import Whisper
from omni_proxy.replica.models.whisper_net import RATE, WhisperFileError
from omni_proxy.replica.pipeline.stage import FunctionScheduler
from omni_proxy.replica.stages import transcribe
from omni_proxy.replica.stages.synthesize import HibariVoice
from omni_proxy.replica.stages.transcribe import TranscribeStage
from tests.replica.models.small_whisper import small_whisper
from tests.replica.stages.stage_harness import running

FILE = cache_folder(os.environ) / MODELS["whisper-tiny"].file
NOISE = (np.random.default_rng(3).standard_normal(2 * 24_000) * 0.1).astype(np.float32)
OTHER = NOISE[::-1].copy()
WAV = encode_wav(NOISE, 24_000)
ASR = {"task": "asr"}


def as_media(samples):
    return {"audio_data": samples.tobytes(), "sample_rate": 24_000}


@pytest.fixture(scope="module")
def whisper():
    return Whisper(small_whisper())


@pytest.fixture
def stage(whisper):
    scheduler = FunctionScheduler("transcribe", TranscribeStage(whisper, max_audio_secs=60))
    with running(scheduler) as stage:
        yield stage


def transcript_of(whisper, samples):
    return whisper.transcribe(resample(samples, 24_000, RATE)).text


def test_a_transcription_streams_its_text_and_ends_with_the_whole(stage, whisper):
    chunks, end = stage.ask({"audios": [as_media(NOISE)]}, **ASR)
    assert (
        end.data["text"]
        == "".join(chunk["text"] for chunk in chunks)
        == transcript_of(whisper, NOISE)
    )
    assert len(chunks) > 1
    assert {chunk["modality"] for chunk in chunks} == {end.data["modality"]} == {"text"}
    assert (end.data["language"], end.data["duration"]) == ("en", 2.0)
    assert end.data["segments"] == [{"id": 0, "start": 0.0, "end": 2.0, "text": end.data["text"]}]
    assert end.data["finish_reason"] == "stop"
    assert end.data["engine_time_s"] > 0


@pytest.mark.parametrize(
    "inputs",
    [WAV, {"audio": WAV}, {"audios": [WAV]}, as_media(NOISE), {"audio": as_media(NOISE)}],
)
def test_audio_is_accepted_in_every_form(stage, inputs):
    _, expected = stage.ask({"audios": [as_media(NOISE)]}, **ASR)
    _, end = stage.ask(inputs, **ASR)
    assert end.data["duration"] == expected.data["duration"]
    assert end.data["text"]


def test_the_audios_of_a_chat_become_transcripts_in_order(stage, whisper):
    inputs = {"messages": [], "audios": [as_media(OTHER), as_media(NOISE)]}
    chunks, end = stage.ask(inputs, task="chat")
    assert chunks == []
    assert end.data["transcripts"] == [transcript_of(whisper, OTHER), transcript_of(whisper, NOISE)]
    assert end.data["transcripts"][0] != end.data["transcripts"][1]
    assert end.data["raw_inputs"] == inputs


def test_a_limit_on_the_tokens_is_kept_and_reported(stage):
    _, whole = stage.ask(WAV, **ASR)
    chunks, end = stage.ask(WAV, params={"max_new_tokens": 3}, **ASR)
    assert end.data["text"] == " ".join(whole.data["text"].split()[:3])
    assert end.data["finish_reason"] == "length"
    assert len(chunks) == 3


@pytest.mark.parametrize("language", ["en", "EN", "English", "en-GB", "auto", "", None])
def test_english_is_accepted_in_any_spelling(stage, language):
    _, end = stage.ask(WAV, asr_params={"language": language}, **ASR)
    assert end.data["language"] == "en"


@pytest.mark.parametrize(
    ("inputs", "params", "reason"),
    [
        (b"ID3\4", {}, "the audio is MP3"),
        ({"audios": [WAV, WAV]}, {}, "a request can have only one audio, not 2"),
        ({"audios": []}, {}, "no audio to transcribe"),
        ("text", {}, "no audio to transcribe"),
        ({"audio": "text"}, {}, "an audio must be a file's bytes, or float32"),
        ({"audio_data": b"\0" * 8}, {}, "an audio must be a file's bytes, or float32"),
        ({"audio_data": b"\0" * 7, "sample_rate": 8000}, {}, "an audio must be a file's bytes"),
        (encode_wav(np.zeros(61 * 8000, np.float32), 8000), {}, "61 s long; the limit is 60 s"),
        (WAV, {"language": "de"}, "language 'de' cannot be transcribed"),
    ],
)
def test_an_audio_that_cannot_be_transcribed_is_an_error_of_the_caller(
    stage, inputs, params, reason
):
    kind, error = stage.fault(inputs, task="asr", asr_params=params)
    assert kind == "caller"
    assert reason in error


class SlowWhisper:
    """The model, blocked after its first text until the test releases it."""

    def __init__(self, whisper):
        self._whisper = whisper
        self.may_continue = threading.Event()
        self.abort_checks = []

    def transcribe(self, samples, on_text, aborted, max_tokens):
        def blocking_on_text(text):
            on_text(text)
            assert self.may_continue.wait(30)

        def recorded_aborted():
            self.abort_checks.append(aborted())
            return self.abort_checks[-1]

        return self._whisper.transcribe(samples, blocking_on_text, recorded_aborted, max_tokens)


def test_an_aborted_transcription_stops_and_the_next_one_runs(whisper):
    slow = SlowWhisper(whisper)
    with running(FunctionScheduler("transcribe", TranscribeStage(slow))) as stage:
        stage.submit("aborted", {"audio": as_media(np.tile(NOISE, 60))}, **ASR)
        assert stage.next().request_id == "aborted"
        stage.abort("aborted")
        stage.settle()
        slow.may_continue.set()
        stage.submit("next", WAV, **ASR)
        assert stage.next().request_id == "next"
    # Checked before the window, before its first two tokens, and before the next window.
    assert slow.abort_checks[:4] == [False, False, True, True]


def test_the_error_about_a_missing_model_says_how_to_fetch_it(tmp_path):
    with pytest.raises(WhisperFileError, match="omni-proxy replica fetch whisper-tiny"):
        transcribe.build("transcribe", path=str(tmp_path / "model.bin"))


@pytest.mark.replica
@pytest.mark.skipif(
    not FILE.exists(), reason=f"{FILE} is not there: omni-proxy replica fetch whisper-tiny"
)
def test_synthesized_speech_is_transcribed():
    pytest.importorskip("hibari")
    voice = HibariVoice.load()
    spoken = np.concatenate(list(voice.sentences("The weather is very nice today.")))
    with running(transcribe.build("transcribe")) as stage:
        chunks, end = stage.ask({"audio": encode_wav(spoken, voice.sample_rate)}, **ASR)
    assert end.data["text"] == "The weather is very nice today."
    assert len(chunks) > 5
