"""Routes with token ids: /tokenize, /detokenize and /inference/v1/generate."""

import json

import pytest

from tests.replica.api.api_fixture import TINY, opened

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
GENERATE = "/inference/v1/generate"


async def status_and_body(response):
    return response.status_code, json.loads(await response.get_data())


async def ok(response):
    status, body = await status_and_body(response)
    assert status == 200, body
    return body


async def test_a_prompt_has_as_many_tokens_as_its_completion_reports(engine):
    body = await ok(await engine.post("/tokenize", {"prompt": "The sea"}))
    assert body["count"] == len(body["tokens"])
    assert body["token_strs"] is None
    assert body["max_model_len"] == 8192
    reply = await ok(await engine.post("/v1/completions", {"prompt": "The sea", "max_tokens": 1}))
    assert reply["usage"]["prompt_tokens"] == body["count"]


async def test_a_chat_has_as_many_tokens_as_its_response_reports(engine):
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    body = await ok(await engine.post("/tokenize", chat | {"return_token_strs": True}))
    reply = await ok(await engine.post("/v1/chat/completions", chat | {"max_tokens": 1}))
    assert reply["usage"]["prompt_tokens"] == body["count"]
    assert body["token_strs"][0] == "<|im_start|>"
    bare = await ok(await engine.post("/tokenize", chat | {"add_generation_prompt": False}))
    assert body["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < body["count"]


async def test_detokenizing_restores_the_text_in_both_formats(engine):
    text = "<|im_start|>user\nGrüße<|im_end|>"
    tokens = (await ok(await engine.post("/tokenize", {"prompt": text})))["tokens"]
    assert await ok(await engine.post("/detokenize", {"tokens": tokens})) == {"prompt": text}
    plain = await ok(await engine.post("/v1/detokenize", {"tokens": tokens}))
    assert plain == {"text": "user\nGrüße"}
    named = {"tokens": [tokens, []], "skip_special_tokens": False}
    assert await ok(await engine.post("/v1/detokenize", named)) == {"text": [text, ""]}


async def test_sglangs_format_takes_lists_and_its_dialect_uses_it_on_both_paths(engine):
    body = {"prompt": ["a", "b c"]}
    lists = await ok(await engine.post("/v1/tokenize", body))
    assert lists["count"] == [len(tokens) for tokens in lists["tokens"]] == [1, 3]
    async with opened(TINY, dialect="sglang", tokenizer_model="tiny") as api:
        assert await ok(await api.post("/tokenize", body)) == lists
        response = await api.post("/detokenize", {"tokens": lists["tokens"]})
        assert await ok(response) == {"text": body["prompt"]}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/tokenize", {}, "2 validation errors"),
        ("/tokenize", {"messages": [], "prompt": None}, "at least one message"),
        ("/tokenize", {"prompt": "x" * 2_000_000}, "context length"),
        ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template is not supported"),
        ("/detokenize", {"tokens": [512]}, "Token id 512 is out of vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "greater than or equal to 0"),
        (GENERATE, {"token_ids": [1]}, "sampling_params"),
        (GENERATE, {"token_ids": [], "sampling_params": {}}, "body.token_ids"),
        (GENERATE, {"token_ids": [9999], "sampling_params": {}}, "out of vocabulary"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"min_tokens": 3}}, "min_tokens is not"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 0}}, "n must be within"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"logprobs": 21}}, "logprobs must be"),
        (GENERATE, {"token_ids": [1], "sampling_params": {}, "features": {"a": 1}}, "features is"),
    ],
)
async def test_an_invalid_request_is_a_400_with_its_reason(engine, path, body, reason):
    status, reply = await status_and_body(await engine.post(path, body))
    assert status == 400
    assert reason in reply["error"]["message"]


async def test_a_server_without_a_tokenizer_refuses_token_calls(api):
    status, reply = await status_and_body(await api.post("/tokenize", {"prompt": "x"}))
    assert (status, reply["error"]["type"]) == (501, "NotImplementedError")


# Generation


async def test_a_generation_has_vllms_keys(engine):
    body = {"token_ids": [5, 6, 7, 8], "sampling_params": GREEDY, "request_id": "mine"}
    reply = await ok(await engine.post(GENERATE, body))
    assert list(reply) == [
        "request_id", "model", "created", "usage", "prompt_logprobs", "prompt_token_id_logprobs",
        "prompt_token_ids", "mm_placeholders", "metrics", "kv_transfer_params",
        "ec_transfer_params", "output_mode", "choices",
    ]  # fmt: skip
    assert reply["request_id"] == "generate-tokens-mine"
    assert reply["usage"]["total_tokens"] == 9
    (choice,) = reply["choices"]
    ids = choice.pop("token_ids")
    assert choice == {
        "index": 0, "finish_reason": "length", "stop_reason": None, "routed_experts": None,
        "sampling_mask": None, "logprobs": None,
        "weight_versions": [{"version": "default", "start": 0, "end": 5}],
    }  # fmt: skip
    text = await ok(await engine.post(GENERATE, body | {"output_mode": "text"}))
    detokenized = await ok(await engine.post("/detokenize", {"tokens": ids}))
    assert text["choices"][0]["text"] == detokenized["prompt"]


async def events_of(api, body):
    response = await api.post(GENERATE, body | {"stream": True})
    parts = (await response.get_data()).decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_the_streamed_events_add_up_to_the_complete_response(engine):
    body = {"token_ids": [5, 6, 7], "sampling_params": GREEDY | {"logprobs": 2, "n": 2, "seed": 1}}
    complete = await ok(await engine.post(GENERATE, body))
    events = await events_of(engine, body | {"stream_options": {"include_usage": True}})
    usage = events.pop()
    assert (usage["choices"], usage["usage"]) == ([], complete["usage"] | {
        "prompt_tokens_details": usage["usage"]["prompt_tokens_details"]})  # fmt: skip
    for index, choice in enumerate(complete["choices"]):
        parts = [part for event in events for part in event["choices"] if part["index"] == index]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        content = [item for part in parts for item in part["logprobs"]["content"]]
        assert [item["token_id"] for item in content] == choice["token_ids"]
        assert parts[-1]["weight_versions"] == choice["weight_versions"]
        assert [part["finish_reason"] for part in parts][-1] == "length"
        for item in choice["logprobs"]["content"]:
            assert item["top_logprobs"][0]["token_id"] == item["token_id"]
            assert len(item["top_logprobs"]) <= 3


async def test_a_requested_stop_token_is_the_stop_reason(engine):
    first = await ok(await engine.post(GENERATE, {"token_ids": [5], "sampling_params": GREEDY}))
    third = first["choices"][0]["token_ids"][2]
    sampling = GREEDY | {"stop_token_ids": [third]}
    reply = await ok(await engine.post(GENERATE, {"token_ids": [5], "sampling_params": sampling}))
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
    assert choice["token_ids"][-1] == third


async def test_the_x_request_id_header_names_the_request(engine):
    data = json.dumps({"token_ids": [5], "sampling_params": {"max_tokens": 1}}).encode()
    response = await engine.call("POST", GENERATE, data, headers={"X-Request-Id": "from-header"})
    assert (await ok(response))["request_id"] == "generate-tokens-from-header"


# Rendering


async def test_a_rendered_chat_generates_the_same_text_as_the_chat(engine):
    chat = {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0.8,
        "seed": 7, "top_k": 40, "presence_penalty": 0.3, "stop": ["zz"],
    }  # fmt: skip
    body = await ok(await engine.post("/v1/chat/completions/render", chat))
    assert body["request_id"].startswith("chatcmpl-")
    reply = await ok(await engine.post(GENERATE, body | {"output_mode": "text"}))
    chat_reply = await ok(await engine.post("/v1/chat/completions", chat))
    assert reply["choices"][0]["text"] == chat_reply["choices"][0]["message"]["content"]
    assert body["sampling_params"]["stop"] == ["zz"]


async def test_prompts_are_rendered_one_by_one_with_vllms_defaults(engine):
    prompts = {"prompt": ["The sea", "A"], "logprobs": 1}
    first, second = await ok(await engine.post("/v1/completions/render", prompts))
    assert len(first["token_ids"]) > len(second["token_ids"]) == 1
    assert first["sampling_params"] == {
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "stop": [], "stop_token_ids": [],
        "max_tokens": 16, "logprobs": 1, "output_kind": 2, "skip_clone": True, "bad_words": [],
        "skip_reading_prefix_cache": False,
    }  # fmt: skip
    same = {"prompt": [5, 6]}
    assert (await ok(await engine.post("/v1/completions/render", same)))[0]["token_ids"] == [5, 6]
    schema = prompts | {"response_format": {"type": "json_object"}}
    status, reply = await status_and_body(await engine.post("/v1/completions/render", schema))
    assert (status, "response_format" in reply["error"]["message"]) == (400, True)
