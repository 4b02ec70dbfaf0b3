import pytest

from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline, capabilities
from omni_proxy.replica.pipeline.config import compile_plan
from omni_proxy.replica.pipeline.coordination.request_flow import RequestFlow
from omni_proxy.replica.pipeline.messages import OmniRequest

EVERYTHING = BuiltinOptions(speech="hibari", transcription="whisper-tiny", images="ocr")
SEES = BuiltinOptions(images="ocr")
BOTH = {"audios": [b"x"], "images": [b"y"]}


def way(choices, inputs, **metadata):
    """The stages of a request, in order, and the terminal ones."""
    flow = RequestFlow(
        compile_plan(builtin_pipeline(choices)), "r", OmniRequest(inputs, {}, metadata)
    )
    passed, sends = [], flow.begin()
    while sends:
        name, _ = sends.pop(0)
        if name not in passed:
            passed.append(name)
            sends += flow.finished(name, {"text": "x"})
    assert flow.done
    return passed, set(flow.results)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("choices", "inputs", "metadata", "passed", "answers"),
    [
        (
            BuiltinOptions(),
            CHAT,
            {"output_modalities": ["text"]},
            ["prepare", "decode"],
            {"decode"},
        ),
        (EVERYTHING, CHAT, {}, ["prepare", "decode"], {"decode"}),
        (
            EVERYTHING,
            CHAT,
            {"output_modalities": ["text", "audio"]},
            ["prepare", "decode", "speak"],
            {"decode", "speak"},
        ),
        (
            EVERYTHING,
            CHAT | {"audios": [b"x"]},
            {"task": "chat", "output_modalities": ["text"]},
            ["transcribe", "prepare", "decode"],
            {"decode"},
        ),
        (EVERYTHING, CHAT | {"images": [b"y"]}, {}, ["look", "prepare", "decode"], {"decode"}),
        (
            EVERYTHING,
            CHAT | BOTH,
            {"task": "chat", "output_modalities": ["audio"]},
            ["transcribe", "look", "prepare", "decode", "speak"],
            {"decode", "speak"},
        ),
        (EVERYTHING, BOTH, {"task": "asr"}, ["transcribe"], {"transcribe"}),
        (SEES, CHAT, {}, ["prepare", "decode"], {"decode"}),
        (SEES, CHAT | BOTH, {}, ["look", "prepare", "decode"], {"decode"}),
        (EVERYTHING, "say it", {"task": "tts"}, ["speak"], {"speak"}),
        (EVERYTHING, b"RIFF", {"task": "asr"}, ["transcribe"], {"transcribe"}),
        (EVERYTHING, "x", {"task": "embed"}, ["prepare", "decode"], {"decode"}),
        (BuiltinOptions(), CHAT | {"audios": [b"x"]}, {}, ["prepare", "decode"], {"decode"}),
    ],
)
def test_a_request_passes_only_the_stages_it_needs(choices, inputs, metadata, passed, answers):
    assert way(choices, inputs, **metadata) == (passed, answers)


def test_stages_live_in_processes_only_where_that_was_chosen():
    choices = BuiltinOptions(speech="hibari", own_process=frozenset({"speak"}))
    stages = {stage.name: stage.process for stage in builtin_pipeline(choices).stages}
    assert stages == {"prepare": "", "decode": "", "speak": "speak"}


def test_what_was_chosen_reaches_the_stages():
    choices = BuiltinOptions(
        model="m.gguf", threads=2, max_running=3, max_in_flight=9, transcription="whisper-tiny"
    )
    config = builtin_pipeline(choices)
    params = {stage.name: stage.params for stage in config.stages}
    assert config.max_in_flight == 9
    assert params["decode"] == {"model": "m.gguf", "max_running": 3, "threads": 2, "tp": 1}
    assert params["prepare"] == {"model": "m.gguf"}


def test_it_can_do_what_its_stages_can():
    assert capabilities(builtin_pipeline(BuiltinOptions())) == {"chat", "streaming"}
    assert capabilities(builtin_pipeline(EVERYTHING)) == {
        "chat",
        "streaming",
        "speech",
        "audio_output",
        "audio_input",
        "image_input",
    }
    assert "image_input" not in capabilities(builtin_pipeline(BuiltinOptions(transcription="x")))
