import pytest
import trio
import trio.testing

from tests.promises.support.clients import CHAT, STREAMED, Truncated, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    SSE_HEAD,
    answering,
    chunk,
    counted,
    fake_workers,
    hanging_up_after,
    resetting,
    silent,
    unreachable_url,
)

EVENT = chunk(b"data: one\n\n")
SINGLE_ATTEMPT = "[routing]\nmax_total_retries = 1"
SHORT_TIMEOUTS = SINGLE_ATTEMPT + "\n[server.timeouts]\nresponse_head_secs = 0.05\nidle_secs = 0.05"


async def ask(client, body=CHAT):
    await client.send(post(body))
    return await client.answer()


async def test_a_refused_connection_is_a_502_with_the_reason():
    async with (
        unreachable_url() as url,
        run_dataplane(url, config=SINGLE_ATTEMPT) as opened,
        opened.client() as client,
    ):
        for failures in (1, 2):  # the connection can be reused
            response = await ask(client)
            assert response.status == 502
            assert b"Connection refused" in response.body
            assert b'"code":"connect_failure"' in response.body
            assert response.one("x-sglang-omni-route-attempt") == "1"
            assert opened.failures() == [failures]


@pytest.mark.parametrize(
    "script",
    [resetting, hanging_up_after(), hanging_up_after(b"HTTP/1.1 200 OK\r\ncontent-")],
    ids=["resets", "closes", "closes in its head"],
)
async def test_a_worker_that_dies_before_the_end_of_its_head_is_a_502(script):
    async with dataplane_and_client(script, config=SINGLE_ATTEMPT) as (opened, client):
        response = await ask(client)
        assert response.status == 502
        assert b'"code":"reset_before_response"' in response.body
        assert opened.failures() == [1]


async def test_a_worker_that_stalls_is_a_504_and_its_connection_is_closed():
    left = trio.Event()

    async def script(call):
        await call.until_left()
        left.set()

    async with dataplane_and_client(script, config=SHORT_TIMEOUTS) as (opened, client):
        response = await ask(client)
        assert response.status == 504
        assert b'"code":"response_timeout"' in response.body
        assert opened.failures() == [1]
        with trio.fail_after(30):
            await left.wait()


async def test_a_worker_that_stalls_within_its_head_is_a_504():
    async def script(call):
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-le")
        await call.until_left()

    async with dataplane_and_client(script, config=SHORT_TIMEOUTS) as (_, client):
        assert (await ask(client)).status == 504


async def test_a_stalled_worker_causes_no_retry():
    async with (
        fake_workers(silent, answering(counted(b"{}"))) as workers,
        run_dataplane(*workers, config=SHORT_TIMEOUTS.replace("= 1\n", "= 6\n")) as opened,
        opened.client() as client,
    ):
        assert (await ask(client)).status == 504  # the worker may be processing the request
        assert [len(worker.requests) for worker in workers] == [1, 0]


GARBAGE = {
    "no http": b"hello, who is there?\r\n\r\n",
    "no http, no end": b"\x00\x01\x02\x03",
    "status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "status 999": b"HTTP/1.1 999 Whatever\r\ncontent-length: 0\r\n\r\n",
    "http 2": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "field without colon": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "folded field": b"HTTP/1.1 200 OK\r\nx-a: b\r\n c\r\ncontent-length: 0\r\n\r\n",
    "length of letters": b"HTTP/1.1 200 OK\r\ncontent-length: abc\r\n\r\n",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",
    "length and chunked": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "gzip coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nabc",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 20_000,
    "null byte in a field": b"HTTP/1.1 200 OK\r\nx-a: b\x00\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_a_malformed_response_is_a_502_and_counts_for_health(name):
    async def script(call):
        await call.send(GARBAGE[name])
        await call.until_left()

    async with dataplane_and_client(script, config=SINGLE_ATTEMPT) as (opened, client):
        response = await ask(client)
        assert response.status == 502
        assert b'"error":{"message":' in response.body
        assert response.one("x-sglang-omni-worker")
        assert opened.failures() == [1]


TRUNCATED = {
    "content-length": b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nabc",
    "content-length, no byte": b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n",
    "chunked": CHUNKED_HEAD + chunk(b"abc"),
    "chunked, no chunk": CHUNKED_HEAD,
    "in a chunk": CHUNKED_HEAD + b"10\r\nabc",
    "in a chunk's size": CHUNKED_HEAD + chunk(b"abc") + b"1",
    "before the last line": CHUNKED_HEAD + chunk(b"abc") + b"0\r\n",
    "sse": SSE_HEAD + EVENT,
    "sse, in a chunk": SSE_HEAD + EVENT + b"20\r\ndata: tw",
    "sse with a length": (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\ndata: x"
    ),
}


@pytest.mark.parametrize("ending", ["closes", "resets"])
@pytest.mark.parametrize("name", TRUNCATED)
async def test_a_truncated_response_never_ends_cleanly(name, ending):
    async def script(call):
        await call.send(TRUNCATED[name])
        await trio.testing.wait_all_tasks_blocked()
        call.reset() if ending == "resets" else call.close()

    async with fake_workers(script) as workers, run_dataplane(*workers) as opened:
        async with opened.client() as client:
            with pytest.raises(Truncated) as truncated:
                await ask(client)
            assert truncated.value.answer.status == 200
            assert opened.failures() == [1]
            assert opened.last["ended_by"] == "worker"
            assert opened.last["outcome"] in ("upstream_error", "stream_error")
        assert len(workers[0].requests) == 1


async def test_a_broken_sse_stream_gets_an_error_event_before_it_is_truncated():
    async with dataplane_and_client(hanging_up_after(SSE_HEAD + EVENT)) as (opened, client):
        with pytest.raises(Truncated) as broken:
            await ask(client, STREAMED)
        events = broken.value.answer.body.decode().split("\n\n")
        assert events[0] == "data: one"
        error_event = next(event for event in events[1:] if event.strip())
        assert error_event.strip().startswith('data: {"error":{"message":"upstream stream failed')
        assert opened.last["outcome"] == "stream_error"


async def test_a_silent_stream_gets_an_error_event_and_is_truncated():
    async def script(call):
        await call.send(SSE_HEAD, EVENT)
        await call.until_left()

    async with dataplane_and_client(script, config=SHORT_TIMEOUTS) as (opened, client):
        with pytest.raises(Truncated) as broken:
            await ask(client, STREAMED)
        assert b'data: {"error":' in broken.value.answer.body
        assert opened.failures() == [1]


async def test_a_worker_that_never_starts_its_body_ends_after_first_byte_secs():
    async def script(call):
        await call.send(SSE_HEAD)
        await call.until_left()

    timeout = "[server.timeouts]\nfirst_byte_secs = 0.05"
    async with dataplane_and_client(script, config=timeout) as (opened, client):
        with pytest.raises(Truncated) as broken:
            await ask(client, STREAMED)
        assert broken.value.answer.status == 200
        assert opened.last["phase"] == "first"


async def test_invalid_chunks_in_a_response_never_end_cleanly():
    received = trio.Event()

    async def script(call):
        await call.send(CHUNKED_HEAD, chunk(b"abc"))
        await received.wait()
        await call.send(b"zz\r\n")

    async with dataplane_and_client(script) as (opened, client):
        await client.send(post())
        await client.until(chunk(b"abc"))
        received.set()
        assert not (await client.until_closed()).endswith(LAST_CHUNK)
        assert opened.failures() == [1]


@pytest.mark.parametrize(
    "pieces",
    [
        (counted(b"ab") + counted(b"evil"),),
        (counted(b"ab"), b"x"),
        (counted(b"ab"), counted(b"evil")),
        (CHUNKED_HEAD + chunk(b"ab") + LAST_CHUNK, b"HTTP/1.1 200 OK\r\n"),
    ],
    ids=["a second response", "a byte later", "a second response later", "after the last chunk"],
)
async def test_bytes_after_a_response_are_dropped_and_end_the_connection(pieces):
    all_sent = trio.Event()

    async def script(call):
        for piece in pieces:
            await call.send(piece)
            await trio.testing.wait_all_tasks_blocked()
        all_sent.set()
        await call.until_left()

    async with fake_workers(script) as workers, run_dataplane(*workers) as opened:
        async with opened.client() as client:
            for _ in range(2):
                response = await ask(client)
                assert response.body == b"ab"
                await all_sent.wait()
                assert client.rest == b""
        assert len(workers[0].calls) == 2


async def test_bytes_after_the_last_chunk_are_not_parsed_as_a_response():
    smuggled = CHUNKED_HEAD + chunk(b"ab") + LAST_CHUNK + counted(b"evil")
    async with dataplane_and_client(answering(smuggled)) as (_, client):
        response = await ask(client)
        assert (response.status, b"evil" in response.body) == (502, False)
        assert client.rest == b""


async def test_a_response_that_ends_with_its_connection_is_sent_in_chunks():
    closing = b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nhello"
    async with dataplane_and_client(hanging_up_after(closing)) as (_, client):
        for _ in range(2):
            response = await ask(client)
            assert (response.status, response.body) == (200, b"hello")
            assert response.one("transfer-encoding") == "chunked"


async def test_a_reset_never_ends_a_response_without_framing_cleanly():
    async def script(call):
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello")
        await trio.testing.wait_all_tasks_blocked()
        call.reset()

    async with dataplane_and_client(script) as (opened, client):
        with pytest.raises(Truncated):
            await ask(client)
        assert opened.failures() == [1]


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n"],
    ids=["204", "304"],
)
async def test_bytes_after_a_response_without_a_body_are_dropped(head):
    async with (
        fake_workers(answering(head + counted(b"evil"))) as workers,
        run_dataplane(*workers) as opened,
    ):
        async with opened.client() as client:
            for _ in range(2):
                response = await ask(client)
                assert (response.status in (204, 304), response.body) == (True, b"")
                await trio.testing.wait_all_tasks_blocked()
                assert client.rest == b""
        assert len(workers[0].calls) == 2


async def test_a_worker_that_does_not_read_its_request_is_a_504():
    async def serve(stream):
        async with stream:
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        url = "http://{}:{}".format(*listener.socket.getsockname())
        async with run_dataplane(url, config=SHORT_TIMEOUTS) as opened, opened.client() as client:
            response = await ask(client, b'{"messages": "%b"}' % (b"x" * 30_000_000))
            assert response.status == 504
            assert opened.last["phase"] == "send"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("head", [CHUNKED_HEAD, SSE_HEAD, b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_truncated_response_to_http_1_0_does_not_end_cleanly_either(head):
    async def script(call):
        await call.send(head, b"5\r\nhello\r\n")
        await trio.testing.wait_all_tasks_blocked()
        call.reset()

    async with dataplane_and_client(script) as (_, client):
        await client.send(post().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        with pytest.raises(Truncated):
            await client.answer()


async def test_a_request_timeout_does_not_count_as_a_failure_of_a_busy_worker():
    async def script(call):
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while True:
            await call.send(b"x")
            await trio.sleep(0.005)

    timeout = "[server]\nrequest_timeout_secs = 0.1"
    async with dataplane_and_client(script, config=timeout) as (opened, client):
        with pytest.raises(Truncated):
            await ask(client)
        assert (opened.last["outcome"], opened.last["ended_by"]) == ("timed_out", "proxy")
        assert opened.failures() == [0]


@pytest.mark.parametrize("status", [502, 504])
async def test_502_and_504_of_a_worker_pass_unchanged_and_count_for_health(status):
    reply = counted(b"mine", status=f"{status} Oh No")
    async with dataplane_and_client(answering(reply)) as (opened, client):
        response = await ask(client)
        assert (response.status, response.body) == (status, b"mine")
        assert opened.failures() == [1]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 501])
async def test_other_errors_of_a_worker_pass_unchanged_without_affecting_health(status):
    reply = counted(b"mine", status=f"{status} Oh No")
    async with fake_workers(answering(reply)) as workers, run_dataplane(*workers) as opened:
        async with opened.client() as client:
            response = await ask(client)
            assert (response.status, response.body) == (status, b"mine")
            assert opened.failures() == [0]
        assert len(workers[0].requests) == 1


async def test_a_response_before_the_end_of_the_body_is_relayed():
    refusal = counted(b"too much", "connection: close", status="413 Payload Too Large")

    async def serve(stream):
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive_some(1024)
            await stream.send_all(refusal)
            while await stream.receive_some(65536):
                pass

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        url = "http://{}:{}".format(*listener.socket.getsockname())
        async with run_dataplane(url) as opened, opened.client() as client:
            response = await ask(client, b'{"messages": "%b"}' % (b"x" * 30_000_000))
            assert (response.status, response.body) == (413, b"too much")
        nursery.cancel_scope.cancel()
