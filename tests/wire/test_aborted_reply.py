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


def test_generate_ends_as_sglang_ends_it():
    reported = unary("/generate")
    assert reported["meta_info"]["id"] == "r1"
    assert reported["meta_info"]["finish_reason"]["type"] == "abort"
    assert (
        reported["text"],
        reported["output_ids"],
        reported["meta_info"]["completion_tokens"],
    ) == ("", [], 0)


def test_a_batch_gets_one_for_each_of_its_ids():
    assert [each["meta_info"]["id"] for each in unary("/generate", ids=("a", "b"))] == ["a", "b"]


def test_without_an_id_of_the_body_the_heads_is_reported():
    assert unary("/v1/completions", ids=())["id"] == "head-id"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openai_routes_end_with_the_finish_reason_abort(path):
    reported = unary(path)
    assert reported["choices"][0]["finish_reason"] == "abort"
    assert (reported["model"], reported["created"]) == ("m", 1_700_000_000)
    assert reported["usage"]["total_tokens"] == 0
    first, last = events(path)
    assert json.loads(first)["choices"][0]["finish_reason"] == "abort"
    assert last == DONE


def test_a_chat_has_a_message_and_a_stream_of_one_a_delta():
    assert unary("/v1/chat/completions")["choices"][0]["message"]["content"] == ""
    chunk = json.loads(events("/v1/chat/completions")[0])
    assert (chunk["object"], chunk["choices"][0]["delta"]["content"]) == (
        "chat.completion.chunk", "",
    )  # fmt: skip


def test_token_generation_ends_with_no_tokens():
    reported = unary("/inference/v1/generate")
    assert reported["request_id"] == "r1"
    assert reported["choices"][0] == {
        "index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort",
    }  # fmt: skip
    assert events("/inference/v1/generate")[-1] == DONE


def test_a_stream_of_messages_ends_with_its_own_last_event():
    assert unary("/v1/messages")["stop_reason"] is None
    kinds = [json.loads(each)["type"] for each in events("/v1/messages")]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_a_response_is_cancelled():
    assert unary("/v1/responses")["status"] == "cancelled"
    first, last = events("/v1/responses")
    assert json.loads(first)["type"] == "response.incomplete"
    assert last == DONE


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", ""])
@pytest.mark.parametrize("stream", [False, True])
def test_what_generates_nothing_gets_an_error(path, stream):
    refused = aborted_reply(request(path, stream=stream))
    assert not isinstance(refused, AbortedReply)
    assert isinstance(refused, HttpError)
    assert (refused.status, refused.code) == (400, "request_aborted")
