import pytest
import trio

from tests.promises.support.clients import CHAT, STREAMED, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    LAST_CHUNK,
    PATIENCE_SECS,
    SSE_HEAD,
    chunk,
    counted,
    fake_workers,
)


class Watched:
    """A worker script that sends `first`, then waits until the proxy closes the connection."""

    def __init__(self, first: bytes = b"") -> None:
        self.first = first
        self.asked = trio.Event()
        self.left = trio.Event()

    async def __call__(self, call):
        if self.first:
            await call.send(self.first)
        self.asked.set()
        await call.until_left()
        self.left.set()


async def until(event):
    with trio.fail_after(PATIENCE_SECS):
        await event.wait()


async def leave(client, how):
    match how:
        case "reset":
            client.reset()
        case "close":
            client.close()
        case "fin":
            await client.stream.send_eof()


@pytest.mark.parametrize("how", ["fin", "close", "reset"])
async def test_a_disconnect_before_the_response_frees_the_worker_at_once(how):
    script = Watched()
    async with fake_workers(script) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            await client.send(post())
            await until(script.asked)
            assert (opened.dataplane.in_flight, opened.fleet.workers[0].in_flight) == (1, 1)
            await leave(client, how)
            await until(script.left)
        assert opened.is_idle()
        assert opened.failures() == [0]
        assert opened.last["outcome"] == "client_disconnected"
        assert (opened.last["ended_by"], opened.last["phase"]) == ("client", "wait")
    assert len(worker.requests) == 1


@pytest.mark.parametrize("how", ["fin", "close", "reset"])
async def test_a_disconnect_within_a_stream_frees_the_worker_at_once(how):
    script = Watched(SSE_HEAD + chunk(b"data: one\n\n"))
    async with fake_workers(script) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            await client.send(post(STREAMED))
            await client.until(b"data: one\n\n")
            await leave(client, how)
            await until(script.left)
        assert opened.is_idle()
        assert opened.failures() == [0]
        assert opened.last["outcome"] == "stream_cancelled"
        assert (opened.last["ended_by"], opened.last["phase"]) == ("client", "relay")


async def test_a_request_is_not_retried_after_its_client_disconnected():
    first, second = Watched(), Watched()
    async with fake_workers(first, second) as fakes, run_dataplane(*fakes) as opened:
        async with opened.client() as client:
            await client.send(post())
            await until(first.asked)
        await until(first.left)
        assert opened.is_idle()
    assert not second.asked.is_set()


async def test_a_disconnect_with_pipelined_requests_frees_the_worker():
    script = Watched()
    async with fake_workers(script) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            await client.send(post(), post())
            await until(script.asked)
        await until(script.left)
        assert opened.is_idle()
    assert len(worker.requests) == 1


class Released:
    """A worker script that answers once `may` is set."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.asked = trio.Event()
        self.may = trio.Event()

    async def __call__(self, call):
        self.asked.set()
        for piece in self.pieces:
            await self.may.wait()
            await call.send(piece)


ANSWER_HALF_CLOSED = '[server]\nhalf_close = "answer"'


@pytest.mark.parametrize(
    "pieces",
    [(counted(b"{}"),), (SSE_HEAD, chunk(b"{}"), LAST_CHUNK)],
    ids=["unary", "stream"],
)
async def test_a_half_closed_client_gets_its_response_if_configured(pieces):
    script = Released(*pieces)
    async with (
        fake_workers(script) as (worker,),
        run_dataplane(worker, config=ANSWER_HALF_CLOSED) as opened,
    ):
        async with opened.client() as client:
            await client.send(post())
            await client.stream.send_eof()
            await until(script.asked)
            script.may.set()
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"{}")
            assert await client.until_closed() == b""
        assert opened.last["outcome"] == "completed"
    assert worker.requests == [("POST /v1/chat/completions HTTP/1.1", CHAT)]


async def test_a_half_closed_client_gets_every_pipelined_response():
    script = Released(counted(b"{}"))
    script.may.set()
    async with dataplane_and_client(script, config=ANSWER_HALF_CLOSED) as (_, client):
        await client.send(post(), post())
        await client.stream.send_eof()
        assert [(await client.answer()).body for _ in range(2)] == [b"{}", b"{}"]
        assert await client.until_closed() == b""


async def test_a_reset_frees_the_worker_although_half_closed_clients_are_served():
    script = Watched()
    async with (
        fake_workers(script) as (worker,),
        run_dataplane(worker, config=ANSWER_HALF_CLOSED) as opened,
    ):
        async with opened.client() as client:
            await client.send(post())
            await until(script.asked)
            client.reset()
            await until(script.left)
        assert opened.is_idle()


async def test_a_reset_within_a_stream_frees_the_worker_although_half_closed_is_served():
    script = Watched(SSE_HEAD + chunk(b"data: one\n\n"))
    async with (
        fake_workers(script) as (worker,),
        run_dataplane(worker, config=ANSWER_HALF_CLOSED) as opened,
    ):
        async with opened.client() as client:
            await client.send(post(STREAMED))
            await client.until(b"data: one\n\n")
            client.reset()
            await until(script.left)
        assert opened.is_idle()
