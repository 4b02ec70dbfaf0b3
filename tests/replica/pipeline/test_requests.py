import pytest

from omni_proxy.replica.pipeline.requests import (
    GenerateRequest,
    PromptMessage,
    SamplingParams,
    to_omni_request,
)


@pytest.mark.parametrize(
    ("request_", "inputs"),
    [
        (GenerateRequest("hi"), "hi"),
        (GenerateRequest((1, 2)), [1, 2]),
        (GenerateRequest([]), []),
        (
            GenerateRequest([PromptMessage("user", "hi")]),
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
        (
            GenerateRequest([{"role": "user", "name": "n"}]),
            {"messages": [{"role": "user", "name": "n"}]},
        ),
        (
            GenerateRequest("hi", media={"audios": [b"x"], "images": []}),
            {"prompt": "hi", "audios": [b"x"]},
        ),
        (
            GenerateRequest({"text": "hi"}, media={"audios": [b"x"]}),
            {"text": "hi", "audios": [b"x"]},
        ),
    ],
)
def test_inputs_are_the_prompt_and_its_media(request_, inputs):
    assert to_omni_request(request_).inputs == inputs


def test_only_parameters_that_are_set_are_passed_to_the_stages():
    assert to_omni_request(GenerateRequest("hi")).params == {
        "stop": [],
        "stop_token_ids": [],
        "stream": False,
    }
    sampling = SamplingParams(
        temperature=0.0, seed=0, stop=("a",), stop_token_ids=(3,), logprobs=True
    )
    request = GenerateRequest(
        "hi",
        sampling=sampling,
        stream=True,
        stage_sampling={"decode": {"top_k": 1}},
        stage_params={"speak": {"speed": 2}},
        extra_params={"talker": 1},
    )
    assert to_omni_request(request).params == {
        "temperature": 0.0,
        "seed": 0,
        "stop": ["a"],
        "stop_token_ids": [3],
        "logprobs": True,
        "stream": True,
        "stage_sampling": {"decode": {"top_k": 1}},
        "stage_params": {"speak": {"speed": 2}},
        "talker": 1,
    }


def test_metadata_have_the_task_and_the_output_modalities():
    request = GenerateRequest(
        "hi", model="m", task="tts", output_modalities=("audio",), metadata={"a": 1}
    )
    assert to_omni_request(request).metadata == {
        "a": 1,
        "model": "m",
        "task": "tts",
        "output_modalities": ["audio"],
    }
