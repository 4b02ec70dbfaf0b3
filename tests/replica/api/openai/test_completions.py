import json
import re
from dataclasses import replace

import pytest
import trio

from omni_proxy.replica.api.openai.multi_generation import MAX_CONCURRENT
from omni_proxy.replica.api.openai.to_generate_request import MAX_PROMPT_TOKENS
from tests.replica.api.api_fixture import (
    HELLO,
    HOLD,
    SCRIPTED,
    USAGE,
    aborted,
    events_of,
    listening,
    opened,
    until,
)

PATH = "/v1/completions"


async def complete(api, script=None, **body):
    return await api.post_script(PATH, script, **{"prompt": "hi", **body})


async def complete_json(api, script=None, **body):
    response = await complete(api, script, **body)
    assert response.status_code == 200, await response.get_data()
    return await response.get_json()


async def events(api, script=None, **body):
    response = await complete(api, script, stream=True, **body)
    return events_of(await response.get_data())


async def error_of(api, **body):
    response = await complete(api, **body)
    error = (await response.get_json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error


async def test_a_response_has_openais_format(api):
    body = await complete_json(api, request_id="R")
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert (body["id"], body["object"], body["model"]) == ("cmpl-R", "text_completion", "fake")
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    assert (body["choices"], body["usage"]) == ([choice], USAGE)


async def test_openais_default_is_16_tokens(api):
    await complete_json(api)
    assert api.last_request.params["max_new_tokens"] == 16
    await complete_json(api, max_tokens=3)
    assert api.last_request.params["max_new_tokens"] == 3
    assert api.last_request.metadata["task"] == "completion"


async def test_token_ids_are_one_prompt(api):
    await complete_json(api, prompt=[1, 2])
    assert api.last_request.inputs == [1, 2]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2, 3]]])
async def test_several_prompts_have_choices_in_order_and_their_usage_is_summed(api, prompt):
    body = await complete_json(api, prompt=prompt)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == {key: 2 * value for key, value in USAGE.items()}


async def test_only_the_last_event_of_a_stream_has_the_usage(api):
    *stream_events, done = await events(api, request_id="R")
    assert done == "[DONE]"
    assert [event["choices"][0]["text"] for event in stream_events] == ["Hel", "lo", ""]
    assert [event["choices"][0]["finish_reason"] for event in stream_events] == [None, None, "stop"]
    assert [event.get("usage") for event in stream_events] == [None, None, USAGE]
    assert {event["id"] for event in stream_events} == {"cmpl-R"}


async def test_streams_of_several_prompts_are_interleaved_and_have_an_index(api):
    *stream_events, done = await events(api, prompt=["a", "b", "c"])
    assert done == "[DONE]"
    texts = {0: "", 1: "", 2: ""}
    for event in stream_events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "Hello", 1: "Hello", 2: "Hello"}
    assert [event["usage"]["total_tokens"] for event in stream_events if "usage" in event] == [12]
    assert "usage" in stream_events[-1]


async def test_the_first_failure_of_several_prompts_ends_them_all(api):
    assert (await complete(api, {"fault": "no"}, prompt=["a", "b"])).status_code == 400
    *_, error, done = await events(api, {"fault": "no"}, prompt=["a", "b"])
    assert (error["error"]["code"], done) == (400, "[DONE]")
    assert api.client.health()["total_requests"] == 0


async def test_a_disconnect_aborts_all_prompts(api):
    body = {"prompt": ["a", "b"], "stream": True, "stage_params": {"play": HOLD}}
    data = json.dumps(body).encode()
    async with listening(api.app) as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as connection:
            head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            await connection.send_all(head.encode() + data)
            received = b""
            with trio.fail_after(30):
                while received.count(b"Hel") < 2:
                    received += await connection.receive_some()
        await aborted()
        await until(lambda: not api.client.health()["total_requests"])


async def test_logprobs_are_openais_four_lists(api):
    script = {"result": {"text": "ab", "output_token_logprobs": [[-0.5, 7, "a"], [-1.5, 8, "b"]]}}
    body = await complete_json(api, script, logprobs=1)
    assert api.last_request.params["logprobs"] is True
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }


async def test_tokens_with_unknown_text_are_reported_by_id(api):
    script = {"result": {"text": "ab", "output_token_logprobs": [[-0.5, 7, None]]}}
    logprobs = (await complete_json(api, script, logprobs=1))["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["token_id:7"], [])


async def test_stop_strings_cut_the_text(api):
    body = await complete_json(api, HELLO, stop="l")
    assert body["choices"][0]["text"] == "He"
    texts = [event["choices"][0]["text"] for event in (await events(api, HELLO, stop="lo"))[:-1]]
    assert "".join(texts) == "Hel"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 2049}, "2048"),
        ({"n": 0}, "n must be within 1 and 128"),
        ({"n": 128, "prompt": ["x"] * 17}, "2176; the limit is 2048"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs must be within 0 and 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": "many"}, "max_tokens: Input should be a valid integer"),
    ],
)
async def test_an_invalid_request_is_a_400_in_openais_error_envelope(api, body, reason):
    status, error = await error_of(api, **body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert reason in error["message"]


async def test_the_error_names_the_invalid_field(api):
    status, error = await error_of(api, temperature=[])
    assert (status, error["param"]) == (400, "temperature")


async def test_errors_of_the_pipeline_keep_their_status_in_the_error_envelope(api):
    response = await complete(api, {"bug": "oops"})
    assert response.status_code == 500
    error = (await response.get_json())["error"]
    assert (error["type"], error["message"]) == ("server_error", "RuntimeError: oops")


async def test_the_response_to_several_prompts_has_a_generated_id(api):
    body = await complete_json(api, prompt=["a", "b"])
    assert re.fullmatch(r"cmpl-[0-9a-f-]{36}", body["id"])


async def test_more_streamed_prompts_than_may_be_in_flight_take_turns():
    async with opened(replace(SCRIPTED, max_in_flight=MAX_CONCURRENT)) as api:
        prompts = ["a"] * (2 * MAX_CONCURRENT)
        response = await api.post_script(PATH, prompt=prompts, stream=True)
        *stream_events, done = events_of(await response.get_data())
        assert done == "[DONE]"
        last_choices = [
            event["choices"][0] for event in stream_events if event["choices"][0]["finish_reason"]
        ]
        assert sorted(event["index"] for event in last_choices) == list(range(len(prompts)))


async def test_a_prompt_with_too_many_token_ids_is_refused(api):
    status, error = await error_of(api, prompt=[7] * (MAX_PROMPT_TOKENS + 1))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert str(MAX_PROMPT_TOKENS) in error["message"]
