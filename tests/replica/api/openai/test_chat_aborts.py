"""Requests that end early: refused, disconnected, or aborted while they are read."""

import json
from contextlib import aclosing
from dataclasses import replace

import pytest
import trio

from tests.replica.api.api_fixture import (
    HEARD,
    HOLD,
    MESSAGES,
    PATIENCE_SECS,
    SCRIPTED,
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


async def running(world):
    """Wait until a stage works on a request."""
    await until(lambda: world.client.health()["request_states"].get("running"))


async def left_alone(world):
    """Wait until no request is live any more."""
    await until(lambda: not world.client.health()["total_requests"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_the_request(world, stream):
    async with listening(world.app) as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as caller:
            await caller.send_all(request_bytes(stream))
            if stream:
                with trio.fail_after(PATIENCE_SECS):
                    got = b""
                    while b"Hel" not in got:
                        got += await caller.receive_some()
            else:
                await running(world)
        await aborted()
        await left_alone(world)


async def test_a_duplicate_of_a_live_id_is_a_400_and_leaves_the_first_alone(world):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: world.chat(HOLD, request_id="R"))
        await running(world)
        answer = await world.chat(request_id="R")
        assert answer.status_code == 400
        assert await answer.get_json() == {"detail": "Request R already exists"}
        error = (await world.chat_events(request_id="R"))[0]["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", 400)
        assert world.client.health()["pending_completions"] == 1
        await world.client.abort("R")
    assert (await world.chat(request_id="R")).status_code == 200


async def test_a_full_queue_is_a_503_and_within_a_stream_an_event():
    async with opened(replace(SCRIPTED, max_in_flight=1)) as world, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: world.chat(HOLD, request_id="R"))
        await running(world)
        answer = await world.chat()
        assert answer.status_code == 503
        assert await answer.get_json() == {"detail": "The request queue is full."}
        events = await world.chat_events()
        message = {"message": "The request queue is full.", "type": "server_error", "code": 503}
        assert events == [{"error": message}, "[DONE]"]
        await world.client.abort("R")


async def test_an_aborted_stream_ends_with_finish_reason_abort(world):
    answers = []

    async def ask():
        answers.append(await world.chat(HOLD, stream=True, request_id="R"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await running(world)
        await world.client.abort("R")
    *_, error, done = events_of(await answers[0].get_data())
    reported = {"message": "aborted", "type": "server_error", "code": 500}
    assert (error, done) == ({"error": reported}, "[DONE]")


async def test_a_failed_stream_can_be_cut_instead(world):
    cutting = world.with_options(cut_failed_streams=True)
    script = {"chunks": [{"text": "a"}], "bug": "oops"}
    async with listening(cutting.app) as port:
        caller = await trio.open_tcp_stream("127.0.0.1", port)
        async with aclosing(caller), trio.open_nursery():
            await caller.send_all(request_bytes(True, stage_params={"play": script}))
            got = b""
            with trio.fail_after(PATIENCE_SECS):
                while piece := await caller.receive_some():
                    got += piece
    assert b'"content": "a"' in got
    assert b"[DONE]" not in got
    assert not got.endswith(b"0\r\n\r\n")


async def test_a_request_that_ended_is_not_aborted(world):
    assert (await world.chat()).status_code == 200
    await world.chat_events()
    assert not HEARD.aborted.is_set()
    assert world.client.health()["request_states"] == {}
