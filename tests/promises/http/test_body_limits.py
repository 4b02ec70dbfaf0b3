import json

import pytest
import trio

from tests.promises.support.clients import CHAT, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    chunk,
)

SMALL = "[server]\nmax_payload_size = 64\n[server.timeouts]\nclient_body_secs = 0.05"
BARE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
CHUNKED = BARE + b"transfer-encoding: chunked\r\n\r\n"


async def test_a_declared_length_above_the_limit_is_413_before_the_body_is_read(worker):
    async with run_dataplane(worker, config=SMALL) as opened, opened.client() as client:
        await client.send(BARE + b"content-length: 65\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.one("connection")) == (413, "close")
        assert b"payload too large" in answer.body
        assert await client.until_closed() == b""
    assert worker.requests == []


async def test_a_client_that_keeps_sending_a_refused_body_still_receives_the_413(worker):
    async with run_dataplane(worker, config=SMALL) as opened, opened.client() as client:
        body = bytes(1_000_000)
        await client.send(BARE + b"content-length: %d\r\n\r\n" % len(body), body)
        assert (await client.answer()).status == 413


async def test_a_chunked_body_is_413_at_the_chunk_size_that_exceeds_the_limit(worker):
    async with run_dataplane(worker, config=SMALL) as opened, opened.client() as client:
        await client.send(CHUNKED, chunk(bytes(60)), b"5\r\n")
        assert (await client.answer()).status == 413
        assert await client.until_closed() == b""
    assert worker.requests == []


async def test_bodies_at_the_limit_are_forwarded(worker):
    body = CHAT.ljust(64)
    async with run_dataplane(worker, config=SMALL) as opened, opened.client() as client:
        await client.send(post(body))
        assert (await client.answer()).status == 200
        await client.send(CHUNKED, chunk(body[:10]), chunk(body[10:]), LAST_CHUNK)
        assert (await client.answer()).status == 200
    assert [received for _, received in worker.requests] == [body, body]


@pytest.mark.parametrize(
    "sent",
    [
        BARE + b"content-length: 20\r\n\r\n{",
        CHUNKED,
        CHUNKED + b"14\r\n{",
        CHUNKED + chunk(CHAT) + b"0\r\n",
    ],
    ids=["declared", "no chunk", "in a chunk", "in the trailer"],
)
async def test_an_incomplete_body_is_408_after_the_timeout(worker, sent):
    async with run_dataplane(worker, config=SMALL) as opened, opened.client() as client:
        await client.send(sent)
        answer = await client.answer()
        assert (answer.status, answer.one("connection")) == (408, "close")
        assert await client.until_closed() == b""
    assert worker.requests == []


@pytest.mark.parametrize(
    "sent",
    [
        b"zz\r\n",
        b"-5\r\n",
        b"0x5\r\n",
        b"1" * 5000,
        b"5;" + b"x" * 5000,
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"3\nabc\r\n",
        b"0\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
    ],
    ids=["word", "minus", "prefix", "huge", "extension", "long", "lf", "bare lf", "trailer"],
)
async def test_broken_chunks_are_refused_and_never_reach_the_worker(worker, sent):
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(CHUNKED, sent)
        answer = await client.answer()
        assert answer.status in (400, 413)
        assert await client.until_closed() == b""
    assert worker.requests == []


async def test_a_client_that_disconnects_within_its_body_reaches_no_worker(worker):
    async with run_dataplane(worker, config=SMALL) as opened:
        async with opened.client() as client:
            await client.send(BARE + b"content-length: 20\r\n\r\n{")
        with trio.fail_after(30):
            await opened.dataplane.drained()
        assert opened.is_idle()
        assert opened.last["outcome"] == "client_disconnected"
    assert worker.requests == []


async def test_100_continue_is_answered_at_once(worker):
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(BARE + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(CHAT))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(CHAT)
        answer = await client.answer()
        assert (answer.status, answer.interim) == (200, [])
    assert worker.requests == [("POST /v1/chat/completions HTTP/1.1", CHAT)]
    assert "expect" not in dict(worker.calls[0].fields)


async def test_a_body_that_is_too_large_is_refused_without_100_continue(worker):
    async with run_dataplane(worker, config=SMALL) as opened, opened.client() as client:
        await client.send(BARE + b"expect: 100-continue\r\ncontent-length: 65\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.interim) == (413, [])


async def test_a_client_that_does_not_wait_for_100_continue_is_served_too(worker):
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(post(CHAT, "expect: 100-continue"))
        assert (await client.answer()).status == 200


async def test_the_request_body_is_released_while_the_response_is_relayed():
    may_end = trio.Event()

    async def script(call):
        await call.send(CHUNKED_HEAD, chunk(b"some"))
        await may_end.wait()
        await call.send(LAST_CHUNK)

    async with dataplane_and_client(script) as (opened, client):
        await client.send(post(b'{"messages": [], "prompt": "%b"}' % (b"x" * 200_000)))
        with trio.fail_after(30):
            while not opened.workers[0].requests:
                await trio.sleep(0.001)
            (connection,) = opened.dataplane.loop.tasks
            while not connection.exchange.relayed:
                await trio.sleep(0.001)
        assert connection.exchange.requirements.body_fields is None
        may_end.set()
        assert (await client.answer()).body == b"some"


async def test_local_replies_of_admin_routes_have_the_fields_that_trainers_read(worker):
    small = "[admin]\nmax_body_bytes = 64\n"
    async with run_dataplane(worker, config=small) as opened:
        for path in (b"/pause_generation", b"/update_weights_from_distributed?x=1"):
            for length in (65, 2):
                async with opened.client() as client:
                    head = b"POST %b HTTP/1.1\r\nhost: proxy\r\ncontent-length: %d\r\n\r\n"
                    await client.send(head % (path, length), b"{}")
                    answer = await client.answer()
                body = json.loads(answer.body)
                # There is no admin API in this test: the data plane generates the replies.
                assert answer.status == (413 if length == 65 else 503)
                assert (body["success"], body["status"]) == (False, "error")
                assert body["message"] == body["error"]["message"]
        async with opened.client() as client:
            await client.send(b"GET /workers HTTP/1.1\r\nhost: proxy\r\n\r\n")
            assert "success" not in json.loads((await client.answer()).body)
