"""OpenAI's responses: by OpenAI's own client, stored ones, follow-ups, and background."""

import json

import openai
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.api.vllm.responses import ResponseStore, StoredResponse
from omni_proxy.replica.pipeline.requests import PromptMessage
from tests.replica.api.api_fixture import TINY, listening, opened

PATH = "/v1/responses"
ASK = {"model": "m", "input": "hi", "max_output_tokens": 4, "temperature": 0}


async def status_and_body(answer):
    return answer.status_code, json.loads(await answer.get_data())


async def ok(answer):
    status, body = await status_and_body(answer)
    assert status == 200, body
    return body


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_a_response_has_vllms_keys_and_the_text_of_a_chat(engine):
    body = await ok(await engine.post(PATH, ASK))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    answer = await ok(await engine.post("/v1/chat/completions", chat))
    assert text_of(body) == answer["choices"][0]["message"]["content"]
    assert body["id"].startswith("resp_")
    assert (body["status"], body["object"]) == ("incomplete", "response")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (17, 4)
    assert body["max_output_tokens"] == 4
    assert {"tools", "truncation", "service_tier", "parallel_tool_calls"} <= body.keys()


async def test_a_stream_counts_its_events_and_ends_with_the_response(engine):
    answer = await engine.post(PATH, ASK | {"stream": True})
    *parts, rest = (await answer.get_data()).decode().split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, payload = part.split("\n")
        events.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["type"] for e in events if "delta" not in e["type"]] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    whole = await ok(await engine.post(PATH, ASK))
    text = "".join(event["delta"] for event in events if "delta" in event)
    assert text == text_of(whole) == text_of(events[-1]["response"])
    stored = await ok(await engine.get(f"{PATH}/{events[0]['response']['id']}"))
    assert stored == events[-1]["response"]


async def test_a_follow_up_continues_the_conversation_without_old_instructions(world):
    first = await ok(await world.post(PATH, ASK | {"instructions": "Be brief."}))
    assert [m["role"] for m in world.heard.inputs["messages"]] == ["system", "user"]
    follow_up = ASK | {"input": "more", "previous_response_id": first["id"]}
    second = await ok(await world.post(PATH, follow_up))
    assert second["previous_response_id"] == first["id"]
    assert world.heard.inputs["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "more"},
    ]
    third = {"model": "m", "input": "x", "previous_response_id": second["id"], "store": False}
    answer = await ok(await world.post(PATH, third))
    assert len(world.heard.inputs["messages"]) == 5
    assert (await status_and_body(await world.get(f"{PATH}/{answer['id']}")))[0] == 404


async def test_items_become_messages_and_unknown_ones_are_refused(world):
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ]  # fmt: skip
    await ok(await world.post(PATH, {"input": items}))
    assert [(m["role"], m["content"]) for m in world.heard.inputs["messages"]] == [
        ("system", "d"), ("user", "u"), ("assistant", "a"), ("assistant", "f({})"), ("user", "r"),
    ]  # fmt: skip
    for wrong in ([{"type": "hologram"}], [{"type": "message", "content": "x"}]):
        status, body = await status_and_body(await world.post(PATH, {"input": wrong}))
        assert (status, body["error"]["param"]) == (400, "input")


async def test_a_stored_response_can_be_forgotten_and_not_cancelled(world):
    made = await ok(await world.post(PATH, ASK))
    one = f"{PATH}/{made['id']}"
    assert await ok(await world.get(one)) == made
    status, body = await status_and_body(await world.post(f"{one}/cancel"))
    assert (status, body["error"]["message"]) == (400, "Cannot cancel a synchronous response.")
    gone = await ok(await world.call("DELETE", one))
    assert gone == {"id": made["id"], "object": "response", "deleted": True}
    missing = {
        "message": f"Response with id '{made['id']}' not found.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": 404,
    }
    for method, path in (("GET", one), ("DELETE", one), ("POST", f"{one}/cancel")):
        assert await status_and_body(await world.call(method, path)) == (404, {"error": missing})
    follow_up = ASK | {"previous_response_id": made["id"]}
    assert await status_and_body(await world.post(PATH, follow_up)) == (404, {"error": missing})


async def test_a_server_that_stores_none_is_as_vllm_by_default(world):
    forgetful = world.with_options(stored_responses=0)
    made = await ok(await forgetful.post(PATH, ASK))
    assert (await status_and_body(await forgetful.get(f"{PATH}/{made['id']}")))[0] == 404
    status, body = await status_and_body(await forgetful.post(PATH, ASK | {"background": True}))
    assert (status, body["error"]["param"]) == (400, "background")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "Field required"),
        ({"input": 5}, "input"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice must be auto or none"),
        ({"input": "x", "stream": True, "background": True}, "cannot be streamed"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "schema must be an object"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(world, body, why):
    status, answer = await status_and_body(await world.post(PATH, body))
    assert status == 400
    assert why in answer["error"]["message"]


# Over a socket: background tasks end with the server


@pytest.fixture
async def using():
    """Runs a function of OpenAI's client beside the server."""
    async with opened(TINY, tokenizer_model="tiny") as world, listening(world.app) as port:

        def used(function):
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                function(client)

        async def use(function):
            await trio.to_thread.run_sync(used, function)

        use.world = world
        yield use


async def test_the_official_client_reads_whole_and_streamed_responses(using):
    def use(client):
        made = client.responses.create(**ASK)
        assert made.output_text
        assert made.usage.output_tokens == 4
        assert client.responses.retrieve(made.id).output_text == made.output_text
        with client.responses.create(**ASK, stream=True) as stream:
            events = list(stream)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == made.output_text
        more = client.responses.create(**ASK, previous_response_id=made.id)
        assert more.usage.input_tokens > made.usage.input_tokens
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)

    await using(use)


async def test_a_background_response_is_made_after_its_request(using):
    def use(client):
        made = client.responses.create(**ASK, background=True)
        assert made.status == "queued"
        while (now := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
            pass
        assert now.status == "incomplete"
        assert now.output_text
        assert now.background

    await using(use)


async def test_a_background_response_that_is_cancelled_leaves_the_engine_free(using):
    def use(client):
        long = ASK | {"max_output_tokens": 6000, "extra_body": {"ignore_eos": True}}
        made = client.responses.create(**long, background=True)
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
        gone = client.responses.create(**long, background=True)
        client.responses.delete(gone.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(made.id)

    await using(use)
    while using.world.client.health()["pending_completions"]:
        await trio.lowlevel.checkpoint()


async def test_an_abort_from_outside_is_reported_as_cancelled(using):
    answers = []

    async def ask():
        body = ASK | {"max_output_tokens": 6000, "ignore_eos": True, "request_id": "resp_mine"}
        answers.append(await status_and_body(await using.world.post(PATH, body)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while not using.world.client.health()["pending_completions"]:
            await trio.lowlevel.checkpoint()
        await using.world.post("/abort_requests", {"request_ids": ["resp_mine"]})
    ((status, body),) = answers
    assert (status, body["status"]) == (200, "cancelled")


# The store


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40), st.integers(0, 4))
def test_the_store_keeps_the_latest_and_never_more_than_its_bound(steps, limit):
    store, kept = ResponseStore(limit), []
    for puts, number in steps:
        name = f"r{number}"
        if puts:
            body = {"id": name, "status": "completed"}
            store.put(StoredResponse(body, [PromptMessage("user", "x")]))
            if name not in kept:
                kept.append(name)
            kept = kept[-limit:] if limit else []
        else:
            assert store.delete(name) == (name in kept)
            kept = [each for each in kept if each != name]
        assert {f"r{n}" for n in range(6) if store.get(f"r{n}")} == set(kept)


def test_large_conversations_push_older_ones_out():
    store = ResponseStore(10)
    for name in ("a", "b", "c"):
        message = PromptMessage("user", "x" * (6 << 20))
        store.put(StoredResponse({"id": name, "status": "completed"}, [message]))
    assert store.get("a") is None
    assert store.get("c") is not None
