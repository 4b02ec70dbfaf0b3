"""OpenAI's responses API: OpenAI's own client, stored responses, follow-ups, background."""

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
REQUEST = {"model": "m", "input": "hi", "max_output_tokens": 4, "temperature": 0}


async def status_and_body(response):
    return response.status_code, json.loads(await response.get_data())


async def ok(response):
    status, body = await status_and_body(response)
    assert status == 200, body
    return body


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_a_response_has_vllms_keys_and_the_text_of_a_chat(engine):
    body = await ok(await engine.post(PATH, REQUEST))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    chat_reply = await ok(await engine.post("/v1/chat/completions", chat))
    assert text_of(body) == chat_reply["choices"][0]["message"]["content"]
    assert body["id"].startswith("resp_")
    assert (body["status"], body["object"]) == ("incomplete", "response")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (17, 4)
    assert body["max_output_tokens"] == 4
    assert {"tools", "truncation", "service_tier", "parallel_tool_calls"} <= body.keys()


async def test_a_stream_counts_its_events_and_ends_with_the_response(engine):
    response = await engine.post(PATH, REQUEST | {"stream": True})
    *parts, remainder = (await response.get_data()).decode().split("\n\n")
    assert remainder == ""
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
    complete = await ok(await engine.post(PATH, REQUEST))
    text = "".join(event["delta"] for event in events if "delta" in event)
    assert text == text_of(complete) == text_of(events[-1]["response"])
    stored = await ok(await engine.get(f"{PATH}/{events[0]['response']['id']}"))
    assert stored == events[-1]["response"]


async def test_a_follow_up_continues_the_conversation_without_old_instructions(api):
    first = await ok(await api.post(PATH, REQUEST | {"instructions": "Be brief."}))
    assert [m["role"] for m in api.last_request.inputs["messages"]] == ["system", "user"]
    follow_up = REQUEST | {"input": "more", "previous_response_id": first["id"]}
    second = await ok(await api.post(PATH, follow_up))
    assert second["previous_response_id"] == first["id"]
    assert api.last_request.inputs["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "more"},
    ]
    third = {"model": "m", "input": "x", "previous_response_id": second["id"], "store": False}
    reply = await ok(await api.post(PATH, third))
    assert len(api.last_request.inputs["messages"]) == 5
    assert (await status_and_body(await api.get(f"{PATH}/{reply['id']}")))[0] == 404


async def test_items_become_messages_and_unknown_ones_are_refused(api):
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ]  # fmt: skip
    await ok(await api.post(PATH, {"input": items}))
    assert [(m["role"], m["content"]) for m in api.last_request.inputs["messages"]] == [
        ("system", "d"), ("user", "u"), ("assistant", "a"), ("assistant", "f({})"), ("user", "r"),
    ]  # fmt: skip
    for wrong in ([{"type": "hologram"}], [{"type": "message", "content": "x"}]):
        status, body = await status_and_body(await api.post(PATH, {"input": wrong}))
        assert (status, body["error"]["param"]) == (400, "input")


async def test_a_stored_response_can_be_deleted_but_not_cancelled(api):
    created = await ok(await api.post(PATH, REQUEST))
    url = f"{PATH}/{created['id']}"
    assert await ok(await api.get(url)) == created
    status, body = await status_and_body(await api.post(f"{url}/cancel"))
    assert (status, body["error"]["message"]) == (400, "Cannot cancel a synchronous response.")
    deletion = await ok(await api.call("DELETE", url))
    assert deletion == {"id": created["id"], "object": "response", "deleted": True}
    missing = {
        "message": f"Response with id '{created['id']}' not found.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": 404,
    }
    for method, path in (("GET", url), ("DELETE", url), ("POST", f"{url}/cancel")):
        assert await status_and_body(await api.call(method, path)) == (404, {"error": missing})
    follow_up = REQUEST | {"previous_response_id": created["id"]}
    assert await status_and_body(await api.post(PATH, follow_up)) == (404, {"error": missing})


async def test_a_server_without_stored_responses_behaves_as_vllm_by_default(api):
    not_storing = api.with_options(stored_responses=0)
    created = await ok(await not_storing.post(PATH, REQUEST))
    assert (await status_and_body(await not_storing.get(f"{PATH}/{created['id']}")))[0] == 404
    status, body = await status_and_body(
        await not_storing.post(PATH, REQUEST | {"background": True})
    )
    assert (status, body["error"]["param"]) == (400, "background")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "Field required"),
        ({"input": 5}, "input"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice must be auto or none"),
        ({"input": "x", "stream": True, "background": True}, "cannot be streamed"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "schema must be an object"),
    ],
)
async def test_an_invalid_request_is_refused_with_its_reason(api, body, reason):
    status, reply = await status_and_body(await api.post(PATH, body))
    assert status == 400
    assert reason in reply["error"]["message"]


# Over a socket, as background tasks need a running server


@pytest.fixture
async def with_client():
    """Yields a function that calls another one with OpenAI's client, in a thread."""
    async with opened(TINY, tokenizer_model="tiny") as api, listening(api.app) as port:

        def call_with_client(function):
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                function(client)

        async def use(function):
            await trio.to_thread.run_sync(call_with_client, function)

        use.api = api
        yield use


async def test_the_official_client_reads_whole_and_streamed_responses(with_client):
    def use(client):
        created = client.responses.create(**REQUEST)
        assert created.output_text
        assert created.usage.output_tokens == 4
        assert client.responses.retrieve(created.id).output_text == created.output_text
        with client.responses.create(**REQUEST, stream=True) as stream:
            events = list(stream)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == created.output_text
        follow_up = client.responses.create(**REQUEST, previous_response_id=created.id)
        assert follow_up.usage.input_tokens > created.usage.input_tokens
        client.responses.delete(created.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(created.id)

    await with_client(use)


async def test_a_background_response_is_generated_after_its_request(with_client):
    def use(client):
        created = client.responses.create(**REQUEST, background=True)
        assert created.status == "queued"
        while (latest := client.responses.retrieve(created.id)).status in ("queued", "in_progress"):
            pass
        assert latest.status == "incomplete"
        assert latest.output_text
        assert latest.background

    await with_client(use)


async def test_a_background_response_that_is_cancelled_leaves_the_engine_free(with_client):
    def use(client):
        long = REQUEST | {"max_output_tokens": 6000, "extra_body": {"ignore_eos": True}}
        cancelled = client.responses.create(**long, background=True)
        assert client.responses.cancel(cancelled.id).status == "cancelled"
        assert client.responses.retrieve(cancelled.id).status == "cancelled"
        deleted = client.responses.create(**long, background=True)
        client.responses.delete(deleted.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(cancelled.id)

    await with_client(use)
    while with_client.api.client.health()["pending_completions"]:
        await trio.lowlevel.checkpoint()


async def test_an_aborted_response_has_status_cancelled(with_client):
    replies = []

    async def send_request():
        body = REQUEST | {"max_output_tokens": 6000, "ignore_eos": True, "request_id": "resp_mine"}
        replies.append(await status_and_body(await with_client.api.post(PATH, body)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_request)
        while not with_client.api.client.health()["pending_completions"]:
            await trio.lowlevel.checkpoint()
        await with_client.api.post("/abort_requests", {"request_ids": ["resp_mine"]})
    ((status, body),) = replies
    assert (status, body["status"]) == (200, "cancelled")


# The store


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40), st.integers(0, 4))
def test_the_store_keeps_the_latest_responses_up_to_its_limit(steps, limit):
    store, expected = ResponseStore(limit), []
    for is_put, number in steps:
        name = f"r{number}"
        if is_put:
            body = {"id": name, "status": "completed"}
            store.put(StoredResponse(body, [PromptMessage("user", "x")]))
            if name not in expected:
                expected.append(name)
            expected = expected[-limit:] if limit else []
        else:
            assert store.delete(name) == (name in expected)
            expected = [other for other in expected if other != name]
        assert {f"r{n}" for n in range(6) if store.get(f"r{n}")} == set(expected)


def test_large_conversations_evict_older_ones():
    store = ResponseStore(10)
    for name in ("a", "b", "c"):
        message = PromptMessage("user", "x" * (6 << 20))
        store.put(StoredResponse({"id": name, "status": "completed"}, [message]))
    assert store.get("a") is None
    assert store.get("c") is not None
