import pytest

from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline, capabilities
from omni_proxy.replica.pipeline.config import compile_plan
from omni_proxy.replica.pipeline.coordination.request_flow import RequestFlow
from omni_proxy.replica.pipeline.stage_messages import OmniRequest

EVERYTHING = BuiltinOptions(speech="hibari", transcription="whisper-tiny", images="ocr")
WITH_OCR = BuiltinOptions(images="ocr")
BOTH = {"audios": [b"x"], "images": [b"y"]}


def stages_of_request(options, inputs, **metadata):
    """The stages that a request passes, in order, and those with a result for the client."""
    flow = RequestFlow(
        compile_plan(builtin_pipeline(options)), "r", OmniRequest(inputs, {}, metadata)
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
    ("options", "inputs", "metadata", "passed", "terminal"),
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
        (WITH_OCR, CHAT, {}, ["prepare", "decode"], {"decode"}),
        (WITH_OCR, CHAT | BOTH, {}, ["look", "prepare", "decode"], {"decode"}),
        (EVERYTHING, "say it", {"task": "tts"}, ["speak"], {"speak"}),
        (EVERYTHING, b"RIFF", {"task": "asr"}, ["transcribe"], {"transcribe"}),
        (EVERYTHING, "x", {"task": "embed"}, ["prepare", "decode"], {"decode"}),
        (BuiltinOptions(), CHAT | {"audios": [b"x"]}, {}, ["prepare", "decode"], {"decode"}),
    ],
)
def test_a_request_passes_only_the_stages_that_it_needs(
    options, inputs, metadata, passed, terminal
):
    assert stages_of_request(options, inputs, **metadata) == (passed, terminal)


def test_only_the_chosen_stages_have_their_own_process():
    options = BuiltinOptions(speech="hibari", own_process=frozenset({"speak"}))
    stages = {stage.name: stage.process for stage in builtin_pipeline(options).stages}
    assert stages == {"prepare": "", "decode": "", "speak": "speak"}


def test_the_options_are_passed_to_the_stages():
    options = BuiltinOptions(
        model="m.gguf", threads=2, max_running=3, max_in_flight=9, transcription="whisper-tiny"
    )
    config = builtin_pipeline(options)
    params = {stage.name: stage.params for stage in config.stages}
    assert config.max_in_flight == 9
    assert params["decode"] == {"model": "m.gguf", "max_running": 3, "threads": 2, "tp": 1}
    assert params["prepare"] == {"model": "m.gguf"}


def test_the_capabilities_are_those_of_the_stages():
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
