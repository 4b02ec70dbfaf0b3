import json

import pytest
import trio

from tests.promises.clients import CHAT, STREAMED, Truncated, post
from tests.promises.dataplane_fixture import dataplane_before, run_dataplane
from tests.promises.fakes import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    PATIENCE_SECS,
    SSE_HEAD,
    chunk,
    counted,
    fake_workers,
    silent,
)

OFTEN = "[server]\nsse_keepalive_secs = 0.05\n"
COMMENT = b": keep-alive\n\n"
EVENT = b"data: one\n\n"
STREAM = chunk(EVENT) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK
SSE = "content-type: text/event-stream"


def once(event, *late, before=()):
    """A worker that sends `before`, and `late` once the event is set."""

    async def script(call):
        if before:
            await call.send(*before)
        await event.wait()
        await call.send(*late)

    return script


async def after_comments(client, event, count=2):
    """Let it go on once the client has seen so many comments; the head that came before them."""
    await client.send(post(STREAMED))
    seen = b""
    for _ in range(count):
        seen += await client.until(COMMENT)
    event.set()
    client.rest = seen + client.rest
    return seen.partition(b"\r\n\r\n")[0]


async def test_a_worker_silent_before_its_head_gets_comments_and_then_its_stream():
    event = trio.Event()
    async with dataplane_before(once(event, SSE_HEAD, STREAM), config=OFTEN) as (opened, client):
        head = await after_comments(client, event)
        assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        answer = await client.answer()
        assert answer.body.startswith(COMMENT * 2)
        assert answer.body.replace(COMMENT, b"") == EVENT + b"data: [DONE]\n\n"
        assert answer.one("x-sglang-omni-request-id") == opened.last["request_id"]
        assert opened.last["outcome"] == "completed"
        await client.send(post(STREAMED))  # and the connection is as good as ever
        assert (await client.answer()).status == 200


async def test_a_worker_silent_behind_its_head_keeps_it_and_gets_comments():
    event = trio.Event()
    script = once(event, STREAM, before=[SSE_HEAD.replace(b"OK\r\n", b"OK\r\nx-a: b\r\n")])
    async with dataplane_before(script, config=OFTEN) as (_, client):
        head = await after_comments(client, event)
        assert b"\r\nx-a: b\r\n" in head
        answer = await client.answer()
        assert answer.one("x-sglang-omni-worker")
        assert answer.body.replace(COMMENT, b"") == EVENT + b"data: [DONE]\n\n"


async def test_a_stream_in_a_coding_is_not_changed():
    """A worker may encode what nobody has asked it to."""
    event = trio.Event()
    encoded = SSE_HEAD.replace(b"OK\r\n", b"OK\r\ncontent-encoding: gzip\r\n")
    async with dataplane_before(once(event, STREAM, before=[encoded]), config=OFTEN) as (_, client):
        await client.send(post(STREAMED))
        head = await client.until(b"\r\n\r\n")
        await trio.sleep(0.3)
        event.set()
        client.rest = head + client.rest
        assert (await client.answer()).body == EVENT + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "late",
    [counted(EVENT, SSE), f"HTTP/1.1 200 OK\r\n{SSE}\r\n\r\n".encode() + EVENT],
    ids=["counted", "closing"],
)
async def test_a_stream_in_another_framing_follows_in_chunks(late):
    event = trio.Event()

    async def script(call):
        await once(event, late)(call)
        call.close()

    async with dataplane_before(script, config=OFTEN) as (opened, client):
        await after_comments(client, event)
        assert (await client.answer()).body.replace(COMMENT, b"") == EVENT
        assert opened.last["outcome"] == "completed"


async def test_an_http_1_0_client_gets_its_comments_plain():
    event = trio.Event()
    async with dataplane_before(once(event, SSE_HEAD, STREAM), config=OFTEN) as (_, client):
        await client.send(post(STREAMED).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head = await client.until(COMMENT)
        assert b"transfer-encoding" not in head
        event.set()
        rest = await client.until_closed()
        assert rest.replace(COMMENT, b"") == EVENT + b"data: [DONE]\n\n"


def event_of(broken):
    """The error event that a cut answer ended with."""
    assert broken.value.answer.status == 200
    return json.loads(broken.value.answer.body.replace(COMMENT, b"").removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (counted(b'{"error": {"message": "no such model"}}', status="404 X"), "no such model"),
        (counted(b"oops", status="500 Internal"), "the worker answered 500: oops"),
        (
            CHUNKED_HEAD.replace(b"200 OK", b"429 Busy") + chunk(b"bu") + chunk(b"sy") + LAST_CHUNK,
            "the worker answered 429: busy",
        ),
        (counted(b"{}"), "the worker answered 200: {}"),
        (counted(EVENT, SSE, "content-encoding: gzip"), "the worker answered 200: data: one\n\n"),
    ],
)
async def test_an_answer_that_is_no_stream_becomes_an_error_event(late, message):
    event = trio.Event()
    async with dataplane_before(once(event, late), config=OFTEN) as (opened, client):
        await after_comments(client, event)
        with pytest.raises(Truncated) as broken:
            await client.answer()
        assert event_of(broken)["error"]["message"] == message
        assert opened.last["outcome"] == "stream_error"


async def test_a_worker_that_dies_behind_comments_is_tried_elsewhere():
    event = trio.Event()

    async def dying(call):
        await event.wait()
        call.reset()

    async def well(call):
        await call.send(SSE_HEAD, STREAM)

    async with (
        fake_workers(dying, well) as made,
        run_dataplane(*made, config=OFTEN) as opened,
        opened.client() as client,
    ):
        await after_comments(client, event)
        assert EVENT in (await client.answer()).body
        assert opened.last["attempts"] == 2


async def test_when_all_have_failed_the_client_is_reported_in_the_stream():
    event = trio.Event()

    async def dying(call):
        await event.wait()
        call.reset()

    config = OFTEN + "[routing]\nmax_total_retries = 1"
    async with dataplane_before(dying, config=config) as (opened, client):
        await after_comments(client, event)
        with pytest.raises(Truncated) as broken:
            await client.answer()
        assert event_of(broken)["error"]["code"] == "reset_before_response"
        assert opened.failures() == [1]


async def test_the_clocks_go_on_beside_comments():
    times = "[server.timeouts]\nresponse_head_secs = 0.3"
    async with dataplane_before(silent, config=OFTEN + times) as (opened, client):
        await client.send(post(STREAMED))
        with pytest.raises(Truncated) as broken:
            await client.answer()
        assert COMMENT in broken.value.answer.body
        assert event_of(broken)["error"]["code"] == "response_timeout"
        assert (opened.last["phase"], opened.failures()) == ("wait", [1])


async def test_a_stream_that_breaks_behind_comments_ends_as_any_other():
    async def script(call):
        await call.send(SSE_HEAD)
        await call.until_left()

    times = "[server.timeouts]\nfirst_byte_secs = 0.3"
    async with dataplane_before(script, config=OFTEN + times) as (_, client):
        await client.send(post(STREAMED))
        with pytest.raises(Truncated) as broken:
            await client.answer()
        body = broken.value.answer.body
        assert body.startswith(COMMENT)
        assert b'data: {"error":{"message":"upstream stream failed' in body


async def test_a_client_that_leaves_between_comments_ends_its_worker():
    left = trio.Event()

    async def script(call):
        await call.until_left()
        left.set()

    async with fake_workers(script) as made, run_dataplane(*made, config=OFTEN) as opened:
        async with opened.client() as client:
            await client.send(post(STREAMED))
            await client.until(COMMENT)
        with trio.fail_after(PATIENCE_SECS):
            await left.wait()
            await opened.dataplane.drained()
        assert opened.last["ended_by"] == "client"


async def test_what_does_not_stream_gets_none():
    event = trio.Event()
    async with dataplane_before(once(event, counted(b"{}")), config=OFTEN) as (_, client):
        await client.send(post(CHAT))
        await trio.sleep(0.3)
        event.set()
        assert (await client.answer()).body == b"{}"


async def test_speech_that_streams_gets_none_before_its_head():
    """It may come as plain audio."""
    event = trio.Event()
    async with dataplane_before(once(event, counted(b"RIFF")), config=OFTEN) as (_, client):
        await client.send(post(b'{"stream": true}', path="/v1/audio/speech"))
        await trio.sleep(0.3)
        event.set()
        assert (await client.answer()).body == b"RIFF"


async def test_no_content_coding_is_requested_where_comments_may_follow():
    event = trio.Event()
    event.set()
    async with dataplane_before(once(event, SSE_HEAD, STREAM), config=OFTEN) as (opened, client):
        for body, wanted in ((STREAMED, 0), (CHAT, 1)):
            await client.send(post(body, "accept-encoding: gzip"))
            await client.answer()
            fields = opened.workers[0].calls[-1].fields
            assert len([name for name, _ in fields if name == "accept-encoding"]) == wanted
