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


async def complete(world, script=None, **body):
    return await world.ask(PATH, script, **{"prompt": "hi", **body})


async def complete_json(world, script=None, **body):
    answer = await complete(world, script, **body)
    assert answer.status_code == 200, await answer.get_data()
    return await answer.get_json()


async def events(world, script=None, **body):
    answer = await complete(world, script, stream=True, **body)
    return events_of(await answer.get_data())


async def refused(world, **body):
    answer = await complete(world, **body)
    error = (await answer.get_json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error


async def test_an_answer_has_openais_shape(world):
    body = await complete_json(world, request_id="R")
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert (body["id"], body["object"], body["model"]) == ("cmpl-R", "text_completion", "fake")
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    assert (body["choices"], body["usage"]) == ([choice], USAGE)


async def test_openais_16_tokens_are_the_default(world):
    await complete_json(world)
    assert world.heard.params["max_new_tokens"] == 16
    await complete_json(world, max_tokens=3)
    assert world.heard.params["max_new_tokens"] == 3
    assert world.heard.metadata["task"] == "completion"


async def test_token_ids_are_one_prompt(world):
    await complete_json(world, prompt=[1, 2])
    assert world.heard.inputs == [1, 2]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2, 3]]])
async def test_several_prompts_are_answered_in_order_and_their_usage_is_summed(world, prompt):
    body = await complete_json(world, prompt=prompt)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == {key: 2 * value for key, value in USAGE.items()}


async def test_a_stream_ends_with_a_finish_event_that_alone_has_the_usage(world):
    *reported, done = await events(world, request_id="R")
    assert done == "[DONE]"
    assert [each["choices"][0]["text"] for each in reported] == ["Hel", "lo", ""]
    assert [each["choices"][0]["finish_reason"] for each in reported] == [None, None, "stop"]
    assert [each.get("usage") for each in reported] == [None, None, USAGE]
    assert {each["id"] for each in reported} == {"cmpl-R"}


async def test_streams_of_several_prompts_are_braided_and_distinguished_by_index(world):
    *reported, done = await events(world, prompt=["a", "b", "c"])
    assert done == "[DONE]"
    texts = {0: "", 1: "", 2: ""}
    for each in reported:
        choice = each["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "Hello", 1: "Hello", 2: "Hello"}
    assert [each["usage"]["total_tokens"] for each in reported if "usage" in each] == [12]
    assert "usage" in reported[-1]


async def test_the_first_of_several_to_fail_ends_them_all(world):
    assert (await complete(world, {"fault": "no"}, prompt=["a", "b"])).status_code == 400
    *_, error, done = await events(world, {"fault": "no"}, prompt=["a", "b"])
    assert (error["error"]["code"], done) == (400, "[DONE]")
    assert world.client.health()["total_requests"] == 0


async def test_hanging_up_on_several_aborts_all(world):
    body = {"prompt": ["a", "b"], "stream": True, "stage_params": {"play": HOLD}}
    data = json.dumps(body).encode()
    async with listening(world.app) as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as caller:
            head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            await caller.send_all(head.encode() + data)
            got = b""
            with trio.fail_after(30):
                while got.count(b"Hel") < 2:
                    got += await caller.receive_some()
        await aborted()
        await until(lambda: not world.client.health()["total_requests"])


async def test_logprobs_have_openais_four_lists(world):
    script = {"result": {"text": "ab", "output_token_logprobs": [[-0.5, 7, "a"], [-1.5, 8, "b"]]}}
    body = await complete_json(world, script, logprobs=1)
    assert world.heard.params["logprobs"] is True
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }


async def test_tokens_whose_text_is_not_known_are_reported_by_id(world):
    script = {"result": {"text": "ab", "output_token_logprobs": [[-0.5, 7, None]]}}
    reported = (await complete_json(world, script, logprobs=1))["choices"][0]["logprobs"]
    assert (reported["tokens"], reported["text_offset"]) == (["token_id:7"], [])


async def test_stop_strings_cut_the_text(world):
    body = await complete_json(world, HELLO, stop="l")
    assert body["choices"][0]["text"] == "He"
    texts = [each["choices"][0]["text"] for each in (await events(world, HELLO, stop="lo"))[:-1]]
    assert "".join(texts) == "Hel"


@pytest.mark.parametrize(
    ("body", "words"),
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
async def test_what_cannot_be_done_is_a_400_in_openais_envelope(world, body, words):
    status, error = await refused(world, **body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]


async def test_the_field_at_fault_is_named(world):
    status, error = await refused(world, temperature=[])
    assert (status, error["param"]) == (400, "temperature")


async def test_faults_of_the_pipeline_keep_their_status_in_the_envelope(world):
    answer = await complete(world, {"bug": "oops"})
    assert answer.status_code == 500
    error = (await answer.get_json())["error"]
    assert (error["type"], error["message"]) == ("server_error", "RuntimeError: oops")


async def test_ids_of_several_prompts_are_derived_from_the_answers(world):
    body = await complete_json(world, prompt=["a", "b"])
    assert re.fullmatch(r"cmpl-[0-9a-f-]{36}", body["id"])


async def test_more_streamed_prompts_than_may_be_in_flight_take_turns():
    async with opened(replace(SCRIPTED, max_in_flight=MAX_CONCURRENT)) as world:
        many = ["a"] * (2 * MAX_CONCURRENT)
        answer = await world.ask(PATH, prompt=many, stream=True)
        *reported, done = events_of(await answer.get_data())
        assert done == "[DONE]"
        ends = [each["choices"][0] for each in reported if each["choices"][0]["finish_reason"]]
        assert sorted(each["index"] for each in ends) == list(range(len(many)))


async def test_a_prompt_of_more_ids_than_any_model_reads_is_not_looked_through(world):
    status, error = await refused(world, prompt=[7] * (MAX_PROMPT_TOKENS + 1))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert str(MAX_PROMPT_TOKENS) in error["message"]
