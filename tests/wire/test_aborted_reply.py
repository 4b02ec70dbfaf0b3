import json

import pytest

from omni_proxy.wire.aborted_reply import AbortedReply, AbortedRequest, aborted_reply
from omni_proxy.wire.errors import HttpError

DONE = "[DONE]"


def request(path, *, stream=False, ids=("r1",)):
    return AbortedRequest(path, "head-id", ids, "m", stream, 1_700_000_000)


def unary(path, **more):
    reply = aborted_reply(request(path, **more))
    assert isinstance(reply, AbortedReply)
    assert (reply.status, reply.content_type) == (200, "application/json")
    return json.loads(reply.body())


def events(path, **more):
    reply = aborted_reply(request(path, stream=True, **more))
    assert reply.content_type.startswith("text/event-stream")
    lines = reply.body().decode().split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def test_the_reply_of_generate_has_the_form_of_sglang():
    body = unary("/generate")
    assert body["meta_info"]["id"] == "r1"
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert (
        body["text"],
        body["output_ids"],
        body["meta_info"]["completion_tokens"],
    ) == ("", [], 0)


def test_a_batch_gets_a_result_for_each_of_its_ids():
    assert [item["meta_info"]["id"] for item in unary("/generate", ids=("a", "b"))] == ["a", "b"]


def test_without_an_id_in_the_body_the_id_of_the_head_is_used():
    assert unary("/v1/completions", ids=())["id"] == "head-id"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openai_routes_end_with_the_finish_reason_abort(path):
    body = unary(path)
    assert body["choices"][0]["finish_reason"] == "abort"
    assert (body["model"], body["created"]) == ("m", 1_700_000_000)
    assert body["usage"]["total_tokens"] == 0
    first, last = events(path)
    assert json.loads(first)["choices"][0]["finish_reason"] == "abort"
    assert last == DONE


def test_a_chat_reply_has_a_message_and_its_stream_a_delta():
    assert unary("/v1/chat/completions")["choices"][0]["message"]["content"] == ""
    chunk = json.loads(events("/v1/chat/completions")[0])
    assert (chunk["object"], chunk["choices"][0]["delta"]["content"]) == (
        "chat.completion.chunk", "",
    )  # fmt: skip


def test_token_generation_ends_with_no_tokens():
    body = unary("/inference/v1/generate")
    assert body["request_id"] == "r1"
    assert body["choices"][0] == {
        "index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort",
    }  # fmt: skip
    assert events("/inference/v1/generate")[-1] == DONE


def test_a_stream_of_the_messages_api_ends_with_message_stop():
    assert unary("/v1/messages")["stop_reason"] is None
    kinds = [json.loads(event)["type"] for event in events("/v1/messages")]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_a_response_of_the_responses_api_is_cancelled():
    assert unary("/v1/responses")["status"] == "cancelled"
    first, last = events("/v1/responses")
    assert json.loads(first)["type"] == "response.incomplete"
    assert last == DONE


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", ""])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_generates_nothing_gets_an_error(path, stream):
    error = aborted_reply(request(path, stream=stream))
    assert not isinstance(error, AbortedReply)
    assert isinstance(error, HttpError)
    assert (error.status, error.code) == (400, "request_aborted")
