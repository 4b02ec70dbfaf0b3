import json

import pytest
import trio

from tests.promises.support.clients import CHAT, STREAMED, Truncated, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    PATIENCE_SECS,
    SSE_HEAD,
    chunk,
    counted,
    fake_workers,
    silent,
)

FREQUENT_COMMENTS = "[server]\nsse_keepalive_secs = 0.05\n"
COMMENT = b": keep-alive\n\n"
EVENT = b"data: one\n\n"
STREAM = chunk(EVENT) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK
SSE = "content-type: text/event-stream"


def sending_after(event, *data, before=()):
    """Returns a worker that sends `before`, and `data` once the event is set."""

    async def script(call):
        if before:
            await call.send(*before)
        await event.wait()
        await call.send(*data)

    return script


async def after_comments(client, event, count=2):
    """Sets the event once the client has received `count` comments; returns the head."""
    await client.send(post(STREAMED))
    received = b""
    for _ in range(count):
        received += await client.until(COMMENT)
    event.set()
    client.rest = received + client.rest
    return received.partition(b"\r\n\r\n")[0]


async def test_comments_are_sent_before_the_head_of_a_slow_worker_and_its_stream():
    event = trio.Event()
    async with dataplane_and_client(
        sending_after(event, SSE_HEAD, STREAM), config=FREQUENT_COMMENTS
    ) as (
        opened,
        client,
    ):
        head = await after_comments(client, event)
        assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        response = await client.answer()
        assert response.body.startswith(COMMENT * 2)
        assert response.body.replace(COMMENT, b"") == EVENT + b"data: [DONE]\n\n"
        assert response.one("x-sglang-omni-request-id") == opened.last["request_id"]
        assert opened.last["outcome"] == "completed"
        await client.send(post(STREAMED))  # the connection can be reused
        assert (await client.answer()).status == 200


async def test_comments_follow_the_head_of_a_worker_that_is_silent_after_it():
    event = trio.Event()
    script = sending_after(event, STREAM, before=[SSE_HEAD.replace(b"OK\r\n", b"OK\r\nx-a: b\r\n")])
    async with dataplane_and_client(script, config=FREQUENT_COMMENTS) as (_, client):
        head = await after_comments(client, event)
        assert b"\r\nx-a: b\r\n" in head
        response = await client.answer()
        assert response.one("x-sglang-omni-worker")
        assert response.body.replace(COMMENT, b"") == EVENT + b"data: [DONE]\n\n"


async def test_no_comments_are_added_to_a_stream_with_a_content_coding():
    """A worker may encode a stream although the request did not allow it."""
    event = trio.Event()
    encoded = SSE_HEAD.replace(b"OK\r\n", b"OK\r\ncontent-encoding: gzip\r\n")
    async with dataplane_and_client(
        sending_after(event, STREAM, before=[encoded]), config=FREQUENT_COMMENTS
    ) as (_, client):
        await client.send(post(STREAMED))
        head = await client.until(b"\r\n\r\n")
        await trio.sleep(0.3)
        event.set()
        client.rest = head + client.rest
        assert (await client.answer()).body == EVENT + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "response",
    [counted(EVENT, SSE), f"HTTP/1.1 200 OK\r\n{SSE}\r\n\r\n".encode() + EVENT],
    ids=["counted", "closing"],
)
async def test_a_stream_in_another_framing_is_sent_in_chunks_after_comments(response):
    event = trio.Event()

    async def script(call):
        await sending_after(event, response)(call)
        call.close()

    async with dataplane_and_client(script, config=FREQUENT_COMMENTS) as (opened, client):
        await after_comments(client, event)
        assert (await client.answer()).body.replace(COMMENT, b"") == EVENT
        assert opened.last["outcome"] == "completed"


async def test_an_http_1_0_client_gets_comments_without_chunks():
    event = trio.Event()
    async with dataplane_and_client(
        sending_after(event, SSE_HEAD, STREAM), config=FREQUENT_COMMENTS
    ) as (
        _,
        client,
    ):
        await client.send(post(STREAMED).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head = await client.until(COMMENT)
        assert b"transfer-encoding" not in head
        event.set()
        rest = await client.until_closed()
        assert rest.replace(COMMENT, b"") == EVENT + b"data: [DONE]\n\n"


def error_event_of(broken):
    """Returns the error event at the end of a truncated response."""
    assert broken.value.answer.status == 200
    return json.loads(broken.value.answer.body.replace(COMMENT, b"").removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (counted(b'{"error": {"message": "no such model"}}', status="404 X"), "no such model"),
        (counted(b"oops", status="500 Internal"), "the worker answered 500: oops"),
        (
            CHUNKED_HEAD.replace(b"200 OK", b"429 Busy") + chunk(b"bu") + chunk(b"sy") + LAST_CHUNK,
            "the worker answered 429: busy",
        ),
        (counted(b"{}"), "the worker answered 200: {}"),
        (counted(b"[" * 100_000, status="500 Internal"), f"the worker answered 500: {'[' * 500}"),
        (counted(EVENT, SSE, "content-encoding: gzip"), "the worker answered 200: data: one\n\n"),
    ],
)
async def test_a_response_that_is_not_a_stream_becomes_an_error_event(response, message):
    event = trio.Event()
    async with dataplane_and_client(sending_after(event, response), config=FREQUENT_COMMENTS) as (
        opened,
        client,
    ):
        await after_comments(client, event)
        with pytest.raises(Truncated) as broken:
            await client.answer()
        assert error_event_of(broken)["error"]["message"] == message
        assert opened.last["outcome"] == "stream_error"


async def test_a_worker_that_dies_after_comments_is_retried_elsewhere():
    event = trio.Event()

    async def dying(call):
        await event.wait()
        call.reset()

    async def healthy(call):
        await call.send(SSE_HEAD, STREAM)

    async with (
        fake_workers(dying, healthy) as workers,
        run_dataplane(*workers, config=FREQUENT_COMMENTS) as opened,
        opened.client() as client,
    ):
        await after_comments(client, event)
        assert EVENT in (await client.answer()).body
        assert opened.last["attempts"] == 2


async def test_when_all_attempts_fail_the_stream_ends_with_an_error_event():
    event = trio.Event()

    async def dying(call):
        await event.wait()
        call.reset()

    config = FREQUENT_COMMENTS + "[routing]\nmax_total_retries = 1"
    async with dataplane_and_client(dying, config=config) as (opened, client):
        await after_comments(client, event)
        with pytest.raises(Truncated) as broken:
            await client.answer()
        assert error_event_of(broken)["error"]["code"] == "reset_before_response"
        assert opened.failures() == [1]


async def test_comments_do_not_extend_timeouts():
    timeouts = "[server.timeouts]\nresponse_head_secs = 0.3"
    async with dataplane_and_client(silent, config=FREQUENT_COMMENTS + timeouts) as (
        opened,
        client,
    ):
        await client.send(post(STREAMED))
        with pytest.raises(Truncated) as broken:
            await client.answer()
        assert COMMENT in broken.value.answer.body
        assert error_event_of(broken)["error"]["code"] == "response_timeout"
        assert (opened.last["phase"], opened.failures()) == ("wait", [1])


async def test_a_stream_that_breaks_after_comments_ends_with_an_error_event():
    async def script(call):
        await call.send(SSE_HEAD)
        await call.until_left()

    timeouts = "[server.timeouts]\nfirst_byte_secs = 0.3"
    async with dataplane_and_client(script, config=FREQUENT_COMMENTS + timeouts) as (_, client):
        await client.send(post(STREAMED))
        with pytest.raises(Truncated) as broken:
            await client.answer()
        body = broken.value.answer.body
        assert body.startswith(COMMENT)
        assert b'data: {"error":{"message":"upstream stream failed' in body


async def test_a_client_that_disconnects_between_comments_ends_its_attempt():
    left = trio.Event()

    async def script(call):
        await call.until_left()
        left.set()

    async with (
        fake_workers(script) as workers,
        run_dataplane(*workers, config=FREQUENT_COMMENTS) as opened,
    ):
        async with opened.client() as client:
            await client.send(post(STREAMED))
            await client.until(COMMENT)
        with trio.fail_after(PATIENCE_SECS):
            await left.wait()
            await opened.dataplane.drained()
        assert opened.last["ended_by"] == "client"


async def test_a_response_that_is_not_streamed_gets_no_comments():
    event = trio.Event()
    async with dataplane_and_client(
        sending_after(event, counted(b"{}")), config=FREQUENT_COMMENTS
    ) as (
        _,
        client,
    ):
        await client.send(post(CHAT))
        await trio.sleep(0.3)
        event.set()
        assert (await client.answer()).body == b"{}"


async def test_streamed_speech_gets_no_comments_before_its_head():
    """Its stream may be plain audio."""
    event = trio.Event()
    async with dataplane_and_client(
        sending_after(event, counted(b"RIFF")), config=FREQUENT_COMMENTS
    ) as (
        _,
        client,
    ):
        await client.send(post(b'{"stream": true}', path="/v1/audio/speech"))
        await trio.sleep(0.3)
        event.set()
        assert (await client.answer()).body == b"RIFF"


async def test_accept_encoding_is_removed_where_comments_may_be_sent():
    event = trio.Event()
    event.set()
    async with dataplane_and_client(
        sending_after(event, SSE_HEAD, STREAM), config=FREQUENT_COMMENTS
    ) as (
        opened,
        client,
    ):
        for body, count in ((STREAMED, 0), (CHAT, 1)):
            await client.send(post(body, "accept-encoding: gzip"))
            await client.answer()
            fields = opened.workers[0].calls[-1].fields
            assert len([name for name, _ in fields if name == "accept-encoding"]) == count
