import socket

import pytest
import trio

from tests.dataplane.loop_script import until
from tests.promises.support.clients import STREAMED, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    PATIENCE_SECS,
    SSE_HEAD,
    chunk,
    counted,
    fake_workers,
)

# More than the kernel holds in four socket buffers; the worker sends twice as much.
MAX_IN_TRANSIT = 32 * 1024 * 1024
PIECE = chunk(bytes(65536))


class Flood:
    """A worker that sends as long as its peer reads, up to a limit."""

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.sent = 0
        self.cut = trio.Event()

    async def __call__(self, call):
        await call.send(self.head)
        try:
            while self.sent < 2 * MAX_IN_TRANSIT:
                await call.send(PIECE)
                self.sent += len(PIECE)
        except trio.BrokenResourceError:
            self.cut.set()


@pytest.mark.parametrize("head", [CHUNKED_HEAD, SSE_HEAD], ids=["chunked", "sse"])
async def test_a_client_that_never_reads_is_disconnected_and_memory_is_limited(head):
    flood = Flood(head)
    timeouts = "[server.timeouts]\nidle_secs = 0.3"
    async with dataplane_and_client(flood, config=timeouts) as (opened, client):
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        await client.send(post(STREAMED))
        with trio.fail_after(PATIENCE_SECS):
            await flood.cut.wait()
        assert flood.sent < MAX_IN_TRANSIT
        assert opened.is_idle()
        assert (opened.last["outcome"], opened.last["ended_by"]) == ("client_stalled", "client")
        assert opened.last["bytes_out"] < MAX_IN_TRANSIT
        assert opened.failures() == [0]


async def test_a_slow_reader_gets_every_byte():
    total = 8 * 1024 * 1024
    payload = bytes(range(256)) * (total // 256)

    async def script(call):
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        await call.send(payload)

    async with fake_workers(script) as (worker,), run_dataplane(worker) as opened:
        async with opened.client() as client:
            client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            await client.send(post())
            response = await client.answer()
            assert response.body == payload
        assert opened.last["outcome"] == "completed"


async def test_a_stuck_reader_blocks_no_other_client():
    flood = Flood(CHUNKED_HEAD)
    served = trio.Event()

    async def responsive(call):
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with fake_workers(flood, responsive) as workers, run_dataplane(*workers) as opened:
        async with opened.client() as stuck:
            await stuck.send(post(STREAMED))
            await stuck.until(b"\r\n\r\n")
            async with opened.client() as client:
                for _ in range(2):
                    await client.send(post())
                    if (await client.answer()).body == b"{}":
                        served.set()
                        break
        assert served.is_set()


async def test_the_request_timeout_applies_to_a_slow_reader():
    flood = Flood(b"HTTP/1.1 200 OK\r\ncontent-length: 999999999\r\n\r\n")
    timeout = "[server]\nrequest_timeout_secs = 0.3"
    async with dataplane_and_client(flood, config=timeout) as (opened, client):
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        await client.send(post())
        with trio.fail_after(PATIENCE_SECS):
            while not flood.cut.is_set():
                await client.receive()
                await trio.sleep(0.01)
        assert opened.last["outcome"] in ("client_stalled", "timed_out")
        assert opened.failures() == [0]


async def test_a_late_pipelining_reader_gets_all_responses_in_order():
    bodies = [b'{"messages": [], "n": "%b"}' % (b"%04d" % number * 4000) for number in range(600)]

    async def echo(call):
        await call.send(counted(call.body))

    def stuck() -> bool:
        return any(task.phase == "client" for task in opened.dataplane.loop.tasks)

    async with dataplane_and_client(echo) as (opened, client), trio.open_nursery() as nursery:
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        nursery.start_soon(client.send, *map(post, bodies))
        await until(stuck)
        assert [(await client.answer()).body for _ in bodies] == bodies
    assert opened.failures() == [0]
