import base64

import pytest

from tests.replica.api.api_fixture import MESSAGES, RATE, USAGE, events_of

PATH = "/generate"
LOGPROBS = [[-0.5, 7, None], [-1.5, 8, None]]
RESULT = {
    "text": "Hello",
    "finish_reason": "stop",
    "usage": USAGE,
    "token_ids": [7, 8],
    "output_token_logprobs": LOGPROBS,
    "weight_version": "v1",
}
SCRIPT = {
    "chunks": [
        {"text": "Hel", "token_ids": [7], "output_token_logprobs": LOGPROBS[:1]},
        {"text": "lo", "token_ids": [8], "output_token_logprobs": LOGPROBS[1:]},
    ],
    "result": RESULT,
}


async def rollout(api, script=SCRIPT, **body):
    return await api.post_script(PATH, script, **body)


async def rollout_json(api, script=SCRIPT, **body):
    response = await rollout(api, script, **body)
    assert response.status_code == 200, await response.get_data()
    return await response.get_json()


# The rollout format


async def test_a_rollout_has_the_keys_of_the_contract(api):
    body = await rollout_json(api, prompt="hi", metadata={"sample": 3})
    assert body == {
        "text": "Hello",
        "audio": None,
        "meta_info": {
            "finish_reason": {"type": "stop", "length": None},
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "weight_version": "v1",
            "request_metadata": {"sample": 3},
            "output_token_logprobs": LOGPROBS,
            "omni_rollout": None,
        },
    }


async def test_logprobs_are_requested_unless_disabled(api):
    await rollout_json(api, prompt="hi")
    assert api.last_request.params["logprobs"] is True
    body = await rollout_json(api, prompt="hi", return_logprob=False)
    assert "logprobs" not in api.last_request.params
    assert body["meta_info"]["output_token_logprobs"] is None


async def test_a_rollout_cut_by_length_reports_its_length_and_cached_tokens(api):
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}
    script = {"result": RESULT | {"finish_reason": "length", "usage": usage}}
    meta = (await rollout_json(api, script, prompt="hi"))["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert meta["cached_tokens"] == 1


@pytest.mark.parametrize(
    ("prompt", "inputs", "task"),
    [
        ({"input_ids": [1, 2]}, [1, 2], "completion"),
        ({"prompt": "hi"}, "hi", "completion"),
        ({"messages": MESSAGES}, {"messages": MESSAGES}, "chat"),
    ],
)
async def test_each_kind_of_prompt_reaches_the_stage(api, prompt, inputs, task):
    await rollout_json(api, **prompt)
    assert (api.last_request.inputs, api.last_request.metadata["task"]) == (inputs, task)


async def test_audio_is_returned_as_a_wav_file(api):
    script = {"result": RESULT | {"samples": 2}}
    body = await rollout_json(api, script, prompt="hi", output_modalities=["text", "audio"])
    assert (body["audio"]["format"], body["audio"]["sample_rate"]) == ("wav", RATE)
    assert body["audio"]["path"] is None
    assert base64.b64decode(body["audio"]["data"])[:4] == b"RIFF"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({}, 400, "exactly one"),
        ({"prompt": "a", "messages": MESSAGES}, 400, "not prompt and messages"),
        ({"prompt": "a", "stream": True}, 400, "stream=true is not supported"),
        ({"prompt": "a", "return_routed_experts": True}, 400, "return_routed_experts"),
        ({"prompt": "a", "multimodal_train_inputs": {"version": 1}}, 400, "multimodal"),
        ({"input_ids": [-1]}, 422, "greater than or equal to 0"),
        ({"input_ids": [2**63]}, 422, "Input should be"),
        ({"prompt": "a", "sampling_params": {"best_of": 2}}, 422, "Extra inputs"),
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, 422, "greater than or equal"),
        ({"prompt": "a", "sampling_params": {"top_p": 0}}, 422, "greater than 0"),
        ({"prompt": "a", "sampling_params": {"min_p": 2}}, 422, "less than or equal to 1"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": 0}}, 422, "greater than or equal"),
    ],
)
async def test_an_invalid_rollout_request_is_refused(api, body, status, reason):
    response = await rollout(api, **body)
    assert response.status_code == status
    assert reason in str((await response.get_json())["detail"])


async def test_missing_logprobs_are_a_501_and_a_wrong_number_a_500(api):
    without_logprobs = {key: RESULT[key] for key in RESULT if key != "output_token_logprobs"}
    response = await rollout(api, {"result": without_logprobs}, prompt="hi")
    assert response.status_code == 501
    assert "return_logprob=false" in (await response.get_json())["detail"]
    one_logprob = RESULT | {"output_token_logprobs": LOGPROBS[:1]}
    response = await rollout(api, {"result": one_logprob}, prompt="hi")
    assert response.status_code == 500
    assert "1 logprobs for 2" in (await response.get_json())["detail"]


async def test_max_tokens_is_an_alias_of_max_new_tokens(api):
    await rollout_json(api, prompt="a", sampling_params={"max_tokens": 5, "stop": "x"})
    assert api.last_request.params["max_new_tokens"] == 5
    assert api.last_request.params["stop"] == ["x"]


# SGLang's own format. Its bodies have no stage parameters, so the stage runs its default script.


async def test_text_selects_sglangs_format_without_logprobs(api):
    response = await api.post(PATH, {"text": "hi", "rid": "R"})
    body = await response.get_json()
    assert list(body) == ["text", "output_ids", "meta_info"]
    meta = body["meta_info"]
    assert body["text"] == "Hello"
    assert (meta["id"], meta["finish_reason"]) == ("R", {"type": "stop"})
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 2, 0)
    assert meta["e2e_latency"] >= 0
    assert "output_token_logprobs" not in meta
    assert "logprobs" not in api.last_request.params


async def test_sglangs_sampling_keys_are_read_and_unsupported_ones_are_ignored(api):
    sampling = {"max_new_tokens": 3, "sampling_seed": 9, "temperature": 0, "no_stop_trim": True}
    response = await api.post(PATH, {"text": "hi", "sampling_params": sampling})
    assert response.status_code == 200
    params = api.last_request.params
    assert (params["max_new_tokens"], params["seed"], params["temperature"]) == (3, 9, 0)


async def test_sglangs_default_is_128_tokens(api):
    await api.post(PATH, {"text": "hi"})
    assert api.last_request.params["max_new_tokens"] == 128


@pytest.mark.parametrize("prompt", [{"text": ["a", "b"]}, {"input_ids": [[1], [2]]}])
async def test_a_list_of_prompts_is_answered_by_a_list(api, prompt):
    results = await (await api.post(PATH, prompt | {"rid": "R"})).get_json()
    assert [result["text"] for result in results] == ["Hello", "Hello"]
    assert [result["meta_info"]["id"] for result in results] == ["R-0", "R-1"]


@pytest.mark.parametrize("prompt", [{"text": "hi"}, {"input_ids": [1, 2]}])
async def test_streamed_events_are_cumulative(api, prompt):
    response = await api.post(PATH, prompt | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = events_of(await response.get_data())
    assert done == "[DONE]"
    assert [event["text"] for event in events] == ["Hel", "Hello", "Hello"]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, {"type": "stop"}]
    assert events[-1]["meta_info"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"text": "a", "input_ids": [1]}, "not both"),
        ({"text": 3}, "text must be"),
        ({"text": "a", "sampling_params": {"n": 2}}, "n must be 1"),
        ({"text": ["a", "b"], "stream": True}, "cannot be streamed"),
        ({"rid": "R"}, "text must be"),
        ({"rid": "R", "input_ids": ["a"]}, "input_ids must be"),
    ],
)
async def test_an_invalid_sglang_request_is_a_400(api, body, reason):
    response = await api.post(PATH, body)
    assert response.status_code == 400
    assert reason in (await response.get_json())["detail"]


async def test_logprobs_from_a_pipeline_without_them_are_a_501_in_sglangs_format(api):
    response = await api.post(PATH, {"text": "hi", "return_logprob": True})
    assert response.status_code == 501


# With the tiny model


async def test_the_tiny_model_returns_one_logprob_for_each_token_in_both_formats(tiny):
    sampling = {"max_new_tokens": 4, "temperature": 0}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
    rollout = await (await tiny.post(PATH, body)).get_json()
    sglang = await (await tiny.post(PATH, body | {"rid": "R", "return_logprob": True})).get_json()
    meta = rollout["meta_info"]
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 4
    assert meta["weight_version"] == "default"
    assert rollout["text"] == sglang["text"]
    ids = [item[1] for item in sglang["meta_info"]["output_token_logprobs"]]
    assert ids == sglang["output_ids"]
    streamed = events_of(
        await (await tiny.post(PATH, body | {"stream": True, "return_logprob": True})).get_data()
    )
    assert streamed[-2]["text"] == sglang["text"]
    assert streamed[-2]["output_ids"] == ids
    assert len(streamed[-2]["meta_info"]["output_token_logprobs"]) == 4
