"""Anthropic's messages API: complete responses, events, token counts, and refused bodies."""

import json

import pytest

from tests.replica.api.api_fixture import USAGE

REQUEST = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/messages"


async def status_and_body(response):
    return response.status_code, json.loads(await response.get_data())


def events_of(data):
    """The payload of each event, whose `type` must equal the event's name."""
    *parts, remainder = data.decode().split("\n\n")
    assert remainder == ""
    payloads = []
    for part in parts:
        name, payload = part.split("\n")
        payload = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        payloads.append(payload)
    return payloads


async def test_a_response_is_a_message_with_anthropics_keys(api):
    status, body = await status_and_body(await api.post(PATH, REQUEST))
    assert status == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "Hello"}],
        "model": "m",
        "stop_reason": "end_turn",
        "usage": {
            "input_tokens": USAGE["prompt_tokens"],
            "output_tokens": USAGE["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


async def test_a_stream_has_every_event_in_order_and_the_same_text(api):
    response = await api.post(f"{PATH}?beta=true", REQUEST | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(await response.get_data())
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert "".join(e["delta"]["text"] for e in events if "text" in e.get("delta", ())) == "Hello"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == USAGE["completion_tokens"]


async def test_the_system_text_is_first_and_without_the_billing_line(api):
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "Be brief."},
    ]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "c"}]},
        {"role": "system", "content": "d"},
    ]  # fmt: skip
    await api.post(PATH, REQUEST | {"system": system, "messages": turns, "tools": [{"name": "f"}]})
    assert api.last_request.inputs["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": 'b\n{"name":"f","input":{"x":1}}'},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    assert api.last_request.params["max_new_tokens"] == 8


async def test_sampling_and_stop_sequences_reach_the_stage(api):
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["END"]}
    await api.post(PATH, REQUEST | body)
    params = api.last_request.params
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.5, 0.9, 3)
    assert params["stop"] == ["END"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons_have_anthropics_names(engine, stream):
    async def stop_and_text(**body):
        response = await engine.post(PATH, REQUEST | {"stream": stream, "temperature": 0} | body)
        data = await response.get_data()
        if not stream:
            body = json.loads(data)
            return body["stop_reason"], body.get("stop_sequence"), body["content"][0]["text"]
        events = events_of(data)
        text = "".join(event.get("delta", {}).get("text", "") for event in events)
        delta = events[-2]["delta"]
        assert events[0]["message"]["usage"]["input_tokens"] == 17
        return delta["stop_reason"], delta["stop_sequence"], text

    reason, stop, text = await stop_and_text()
    assert (reason, stop) == ("max_tokens", None)
    word = text[3:5]
    cut = await stop_and_text(stop_sequences=[word])
    assert cut == ("stop_sequence", word, text[: text.index(word)])


async def test_tokens_read_from_the_cache_are_counted_separately(engine):
    body = REQUEST | {"messages": [{"role": "user", "content": "hi " * 40}], "max_tokens": 2}
    _, first = await status_and_body(await engine.post(PATH, body))
    _, second = await status_and_body(await engine.post(PATH, body))
    count = {"model": "m", "messages": body["messages"]}
    _, counted = await status_and_body(await engine.post(f"{PATH}/count_tokens", count))
    total = counted["input_tokens"]
    assert counted["context_management"] == {"original_input_tokens": total}
    assert first["usage"]["input_tokens"] == total
    assert second["usage"]["cache_read_input_tokens"] == total - 1
    assert second["usage"]["input_tokens"] == 1


async def test_errors_have_anthropics_format_and_those_of_a_missing_field_vllms(api):
    status, body = await status_and_body(await api.post(PATH, {"model": "m"}))
    assert (status, body["error"]["param"]) == (400, "body.messages")
    status, body = await status_and_body(
        await api.post(PATH, REQUEST | {"tool_choice": {"type": "any"}})
    )
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "BadRequestError")
    unknown = [{"role": "user", "content": [{"type": "hologram"}]}]
    status, body = await status_and_body(await api.post(PATH, REQUEST | {"messages": unknown}))
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    assert "hologram" in body["error"]["message"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    denied = api.with_options(capabilities=frozenset())
    turn = [{"role": "user", "content": [image]}]
    status, body = await status_and_body(await denied.post(PATH, REQUEST | {"messages": turn}))
    assert "accepts no images" in body["error"]["message"]
    assert (await status_and_body(await api.post(f"{PATH}/count_tokens", REQUEST)))[0] == 501


async def test_a_failure_before_the_first_event_is_a_plain_error(engine):
    body = REQUEST | {"messages": [{"role": "user", "content": "x" * 60_000}], "stream": True}
    status, error = await status_and_body(await engine.post(PATH, body))
    assert (status, error["type"]) == (400, "error")
    assert "context length" in error["error"]["message"]
