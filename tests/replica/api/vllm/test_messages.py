"""Anthropic's messages: complete responses, events, token counts, and refused bodies."""

import json

import pytest

from tests.replica.api.api_fixture import USAGE

ASK = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/messages"


async def status_and_body(answer):
    return answer.status_code, json.loads(await answer.get_data())


def events_of(data):
    """(name, payload) of each event; their names are also in the payloads."""
    *parts, rest = data.decode().split("\n\n")
    assert rest == ""
    found = []
    for part in parts:
        name, payload = part.split("\n")
        payload = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        found.append(payload)
    return found


async def test_an_answer_is_a_message_with_anthropics_keys(world):
    status, body = await status_and_body(await world.post(PATH, ASK))
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


async def test_a_stream_has_every_event_in_order_and_the_same_text(world):
    answer = await world.post(f"{PATH}?beta=true", ASK | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(await answer.get_data())
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert "".join(e["delta"]["text"] for e in events if "text" in e.get("delta", ())) == "Hello"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == USAGE["completion_tokens"]


async def test_the_system_text_is_first_without_its_varying_line(world):
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
    await world.post(PATH, ASK | {"system": system, "messages": turns, "tools": [{"name": "f"}]})
    assert world.heard.inputs["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": 'b\n{"name":"f","input":{"x":1}}'},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    assert world.heard.params["max_new_tokens"] == 8


async def test_sampling_and_stops_are_those_of_the_request(world):
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["END"]}
    await world.post(PATH, ASK | body)
    params = world.heard.params
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.5, 0.9, 3)
    assert params["stop"] == ["END"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_why_it_ended_is_reported_in_anthropics_words(engine, streamed):
    async def ended(**body):
        answer = await engine.post(PATH, ASK | {"stream": streamed, "temperature": 0} | body)
        data = await answer.get_data()
        if not streamed:
            body = json.loads(data)
            return body["stop_reason"], body.get("stop_sequence"), body["content"][0]["text"]
        events = events_of(data)
        text = "".join(event.get("delta", {}).get("text", "") for event in events)
        delta = events[-2]["delta"]
        assert events[0]["message"]["usage"]["input_tokens"] == 17
        return delta["stop_reason"], delta["stop_sequence"], text

    reason, stop, text = await ended()
    assert (reason, stop) == ("max_tokens", None)
    word = text[3:5]
    cut = await ended(stop_sequences=[word])
    assert cut == ("stop_sequence", word, text[: text.index(word)])


async def test_what_is_read_from_the_cache_is_distinguished(engine):
    ask = ASK | {"messages": [{"role": "user", "content": "hi " * 40}], "max_tokens": 2}
    _, first = await status_and_body(await engine.post(PATH, ask))
    _, second = await status_and_body(await engine.post(PATH, ask))
    count = {"model": "m", "messages": ask["messages"]}
    _, counted = await status_and_body(await engine.post(f"{PATH}/count_tokens", count))
    total = counted["input_tokens"]
    assert counted["context_management"] == {"original_input_tokens": total}
    assert first["usage"]["input_tokens"] == total
    assert second["usage"]["cache_read_input_tokens"] == total - 1
    assert second["usage"]["input_tokens"] == 1


async def test_errors_are_anthropics_and_those_of_a_body_vllms(world):
    status, body = await status_and_body(await world.post(PATH, {"model": "m"}))
    assert (status, body["error"]["param"]) == (400, "body.messages")
    status, body = await status_and_body(
        await world.post(PATH, ASK | {"tool_choice": {"type": "any"}})
    )
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "BadRequestError")
    unknown = [{"role": "user", "content": [{"type": "hologram"}]}]
    status, body = await status_and_body(await world.post(PATH, ASK | {"messages": unknown}))
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    assert "hologram" in body["error"]["message"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    denied = world.with_options(capabilities=frozenset())
    turn = [{"role": "user", "content": [image]}]
    status, body = await status_and_body(await denied.post(PATH, ASK | {"messages": turn}))
    assert "accepts no images" in body["error"]["message"]
    assert (await status_and_body(await world.post(f"{PATH}/count_tokens", ASK)))[0] == 501


async def test_a_failure_before_the_first_event_is_a_plain_error(engine):
    body = ASK | {"messages": [{"role": "user", "content": "x" * 60_000}], "stream": True}
    status, error = await status_and_body(await engine.post(PATH, body))
    assert (status, error["type"]) == (400, "error")
    assert "context length" in error["error"]["message"]
