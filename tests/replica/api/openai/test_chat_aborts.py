"""Requests that end early: refused, disconnected, or aborted while they are read."""

import json
from contextlib import aclosing
from dataclasses import replace

import pytest
import trio

from tests.replica.api.api_fixture import (
    HOLD,
    MESSAGES,
    RECORDED,
    SCRIPTED,
    TIMEOUT_SECS,
    aborted,
    events_of,
    listening,
    opened,
    until,
)

PATH = "/v1/chat/completions"


def request_bytes(stream, **body):
    body = {"messages": MESSAGES, "stream": stream, "stage_params": {"play": HOLD}, **body}
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def until_running(api):
    """Wait until a stage is running a request."""
    await until(lambda: api.client.health()["request_states"].get("running"))


async def until_idle(api):
    """Wait until no request is live."""
    await until(lambda: not api.client.health()["total_requests"])


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_all_choices_of_the_request(api, stream, choices):
    async with listening(api.app) as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as connection:
            await connection.send_all(request_bytes(stream, n=choices))
            if stream:
                with trio.fail_after(TIMEOUT_SECS):
                    received = b""
                    while b"Hel" not in received:
                        received += await connection.receive_some()
            else:
                await until_running(api)
        await aborted()
        await until_idle(api)


async def test_a_duplicate_of_a_live_id_is_a_400_and_the_first_request_continues(api):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: api.chat(HOLD, request_id="R"))
        await until_running(api)
        response = await api.chat(request_id="R")
        assert response.status_code == 400
        assert await response.get_json() == {"detail": "Request R already exists"}
        error = (await api.chat_events(request_id="R"))[0]["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", 400)
        assert api.client.health()["pending_completions"] == 1
        await api.client.abort("R")
    assert (await api.chat(request_id="R")).status_code == 200


async def test_a_full_queue_is_a_503_or_an_error_event_within_a_stream():
    async with opened(replace(SCRIPTED, max_in_flight=1)) as api, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: api.chat(HOLD, request_id="R"))
        await until_running(api)
        response = await api.chat()
        assert response.status_code == 503
        assert await response.get_json() == {"detail": "The request queue is full."}
        events = await api.chat_events()
        message = {"message": "The request queue is full.", "type": "server_error", "code": 503}
        assert events == [{"error": message}, "[DONE]"]
        await api.client.abort("R")


async def test_an_aborted_stream_ends_with_an_error_event(api):
    responses = []

    async def chat():
        responses.append(await api.chat(HOLD, stream=True, request_id="R"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chat)
        await until_running(api)
        await api.client.abort("R")
    *_, error, done = events_of(await responses[0].get_data())
    expected = {"message": "aborted", "type": "server_error", "code": 500}
    assert (error, done) == ({"error": expected}, "[DONE]")


async def test_with_cut_failed_streams_a_failed_stream_is_cut(api):
    cutting = api.with_options(cut_failed_streams=True)
    script = {"chunks": [{"text": "a"}], "bug": "oops"}
    async with listening(cutting.app) as port:
        connection = await trio.open_tcp_stream("127.0.0.1", port)
        async with aclosing(connection), trio.open_nursery():
            await connection.send_all(request_bytes(True, stage_params={"play": script}))
            received = b""
            with trio.fail_after(TIMEOUT_SECS):
                while chunk := await connection.receive_some():
                    received += chunk
    assert b'"content": "a"' in received
    assert b"[DONE]" not in received
    assert not received.endswith(b"0\r\n\r\n")


async def test_a_completed_request_is_not_aborted(api):
    assert (await api.chat()).status_code == 200
    await api.chat_events()
    assert not RECORDED.aborted.is_set()
    assert api.client.health()["request_states"] == {}
