import pytest
import trio
import trio.testing

from tests.promises.support.clients import CHAT, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    answering,
    chunk,
    counted,
    fake_workers,
    hanging_up_after,
)

CHUNKED = CHUNKED_HEAD + chunk(b"he") + chunk(b"llo") + LAST_CHUNK
CLOSING = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello"


async def echo(call):
    """Send the body back: chunked if its length is odd, else with a length."""
    if len(call.body) % 2:
        await call.send(CHUNKED_HEAD, chunk(call.body), LAST_CHUNK)
    else:
        await call.send(counted(call.body))


def post_http_1_0(body=CHAT, *fields):
    return post(body, *fields).replace(b"HTTP/1.1", b"HTTP/1.0", 1)


async def test_both_sides_keep_their_connections():
    async with fake_workers(echo) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            for _ in range(20):
                await client.send(post())
                answer = await client.answer()
                assert (answer.status, answer.one("connection")) == (200, None)
        assert opened.dataplane.services.totals.accepted == 1
    assert [len(worker.requests), len(worker.calls)] == [20, 1]


async def test_successive_clients_share_the_workers_connection():
    async with fake_workers(echo) as (worker,), run_dataplane(worker) as opened:
        for _ in range(3):
            async with opened.client() as client:
                await client.send(post())
                assert (await client.answer()).status == 200
    assert len(worker.calls) == 1


async def test_pipelined_requests_are_answered_in_order():
    bodies = [b'{"messages": [], "n": %b}' % (b"1" * number) for number in range(1, 30)]
    async with dataplane_and_client(echo, echo) as (opened, client):
        await client.send(*map(post, bodies))
        assert [(await client.answer()).body for _ in bodies] == bodies
    assert sum(len(worker.requests) for worker in opened.workers) == len(bodies)


@pytest.mark.parametrize("body", [b"first", bytes(1 << 20)], ids=["small", "large"])
async def test_a_websocket_handshake_may_follow_a_request(body):
    handshake = (
        b"GET /v1/audio/speech/stream HTTP/1.1\r\nhost: proxy\r\nupgrade: websocket\r\n"
        b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with dataplane_and_client(answering(counted(body))) as (_, client):
        await client.send(post(), handshake)
        assert (await client.answer()).body == body
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")


async def test_a_pipelined_response_waits_for_the_one_before():
    may_answer = trio.Event()

    async def script(call):
        if b"first" in call.body:
            await may_answer.wait()
        await call.send(counted(call.body))

    first, second = b'{"id": "first"}', b'{"id": "second"}'
    async with dataplane_and_client(script, script) as (opened, client):
        await client.send(post(first), post(second))
        async with opened.client() as other:
            await other.send(post())
            assert (await other.answer()).status == 200
        assert [len(worker.requests) for worker in opened.workers] == [1, 1]
        may_answer.set()
        assert [(await client.answer()).body for _ in range(2)] == [first, second]


async def test_chunked_requests_may_be_pipelined_too():
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    bodies = [b"%d" % number for number in range(9)]
    sent = [head + chunk(body) + chunk(body) + LAST_CHUNK for body in bodies]
    async with dataplane_and_client(echo) as (_, client):
        await client.send(*sent)
        assert [(await client.answer()).body for _ in bodies] == [body * 2 for body in bodies]


async def test_a_request_may_be_split_anywhere():
    sent = post() + post(b'{"messages": [], "x": 1}')
    async with fake_workers(echo) as (worker,), run_dataplane(worker) as opened:
        for cut in range(1, len(sent), 7):
            async with opened.client() as client:
                await client.send(sent[:cut])
                await trio.testing.wait_all_tasks_blocked()
                await client.send(sent[cut:])
                assert (await client.answer()).body == CHAT
                assert (await client.answer()).body == b'{"messages": [], "x": 1}'


async def test_connection_close_is_honoured():
    async with dataplane_and_client(echo) as (opened, client):
        await client.send(post(CHAT, "connection: close"), post())
        answer = await client.answer()
        assert (answer.body, answer.one("connection")) == (CHAT, "close")
        assert await client.until_closed() == b""
    assert len(opened.workers[0].requests) == 1


async def test_a_worker_that_closes_after_each_response_gets_new_connections():
    script = hanging_up_after(counted(b"{}", "connection: close"))
    async with fake_workers(script) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            for _ in range(3):
                await client.send(post())
                answer = await client.answer()
                assert (answer.status, answer.one("connection")) == (200, None)
        assert opened.failures() == [0]
    assert len(worker.calls) == 3


@pytest.mark.parametrize(
    "script",
    [answering(counted(b"hello")), answering(CHUNKED), hanging_up_after(CLOSING)],
    ids=["counted", "chunked", "closing"],
)
async def test_an_http_1_0_client_gets_an_unchunked_response_and_the_close(script):
    async with fake_workers(script) as fakes, run_dataplane(*fakes) as opened:
        async with opened.client() as client:
            await client.send(post_http_1_0())
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"hello")
            assert answer.one("transfer-encoding") is None
            assert await client.until_closed() == b""
        assert opened.last["outcome"] == "completed"


async def test_an_http_1_0_client_may_keep_its_connection():
    async with dataplane_and_client(answering(counted(b"hello"))) as (_, client):
        for _ in range(2):
            await client.send(post_http_1_0(CHAT, "connection: keep-alive"))
            answer = await client.answer()
            assert (answer.body, answer.one("connection")) == (b"hello", "keep-alive")


async def test_a_chunked_response_to_an_http_1_0_keep_alive_client_ends_with_close():
    async with dataplane_and_client(answering(CHUNKED)) as (_, client):
        await client.send(post_http_1_0(CHAT, "connection: keep-alive"))
        answer = await client.answer()
        assert (answer.body, answer.one("connection")) == (b"hello", "close")


async def test_an_http_1_0_client_without_a_host_is_served():
    async with dataplane_and_client(echo) as (_, client):
        await client.send(post_http_1_0().replace(b"host: proxy\r\n", b""))
        assert (await client.answer()).body == CHAT


async def test_an_error_response_to_head_has_no_body_and_keeps_the_connection():
    async with dataplane_and_client(echo) as (_, client):
        await client.send(b"HEAD /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\n\r\n", post())
        answer = await client.answer("HEAD")
        assert (answer.status, answer.body) == (405, b"")
        assert int(answer.one("content-length")) > 0
        assert (await client.answer()).body == CHAT


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_responses_without_a_body_end_after_their_head(status):
    head = f"HTTP/1.1 {status}\r\nx-a: b\r\n\r\n".encode()
    async with dataplane_and_client(answering(head)) as (opened, client):
        for _ in range(2):
            await client.send(post())
            answer = await client.answer()
            assert (answer.status, answer.body) == (int(status[:3]), b"")
            assert answer.one("transfer-encoding") is None
    assert len(opened.workers[0].calls) == 1


async def test_interim_responses_of_a_worker_precede_the_final_one():
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
    async with dataplane_and_client(answering(hints, counted(b"{}"))) as (_, client):
        for _ in range(2):
            await client.send(post())
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"{}")


async def test_a_refused_request_with_a_complete_body_keeps_the_connection():
    async with dataplane_and_client(echo) as (_, client):
        await client.send(post(b"no json"), post())
        assert (await client.answer()).status == 400
        assert (await client.answer()).body == CHAT


async def test_a_chunked_response_that_arrives_in_one_piece_keeps_its_framing():
    async with dataplane_and_client(answering(CHUNKED)) as (_, client):
        for _ in range(2):
            await client.send(post())
            answer = await client.answer()
            assert (answer.body, answer.one("transfer-encoding")) == (b"hello", "chunked")
