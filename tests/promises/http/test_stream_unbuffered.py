import pytest
import trio

from tests.promises.support.clients import STREAMED, client_of, post
from tests.promises.support.dataplane_fixture import dataplane_and_client
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    PATIENCE_SECS,
    SSE_HEAD,
    chunk,
    counted,
    fake_workers,
)
from tests.promises.support.fleet_program import program, put, toml

PIECES = [b"data: %d\n\n" % number for number in range(20)] + [b"data: [DONE]\n\n"]


class Stepwise:
    """Sends each piece only after the client has confirmed the one before."""

    def __init__(self, head: bytes, *pieces: bytes) -> None:
        self.head = head
        self.pieces = pieces
        self.confirm, self._confirmed = trio.open_memory_channel[None](0)

    async def __call__(self, call):
        if call.line.startswith("GET "):  # the proxy reads the weight version
            await call.send(counted(b"{}", status="404 Not Found"))
            return
        await call.send(self.head)
        for piece in self.pieces:
            with trio.fail_after(PATIENCE_SECS):
                await self._confirmed.receive()
            await call.send(piece)
        call.close()


async def read_stepwise(client, script, pieces):
    await client.send(post(STREAMED))
    await client.until(b"\r\n\r\n")
    for piece in pieces:
        await script.confirm.send(None)
        await client.until(piece)


FRAMINGS = {
    "sse": (SSE_HEAD, [chunk(piece) for piece in PIECES] + [LAST_CHUNK]),
    "chunked": (CHUNKED_HEAD, [chunk(piece) for piece in PIECES] + [LAST_CHUNK]),
    "length": (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(b"".join(PIECES)), PIECES),
    "close": (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", PIECES),
}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_each_piece_is_forwarded_when_it_arrives(framing):
    head, pieces = FRAMINGS[framing]
    script = Stepwise(head, *pieces)
    async with dataplane_and_client(script) as (_, client):
        await read_stepwise(client, script, PIECES)


async def test_parts_of_a_chunk_are_forwarded_when_they_arrive():
    parts = [b"1f\r\ndata: one", b" two", b" three", b" and so on\n\n\r\n", LAST_CHUNK]
    script = Stepwise(SSE_HEAD, *parts)
    async with dataplane_and_client(script) as (_, client):
        await read_stepwise(client, script, parts)


async def test_the_head_does_not_wait_for_the_body():
    released = trio.Event()

    async def script(call):
        await call.send(SSE_HEAD)
        await released.wait()
        await call.send(chunk(b"data: one\n\n"), LAST_CHUNK)

    async with dataplane_and_client(script) as (_, client):
        await client.send(post(STREAMED))
        assert b" 200 OK\r\n" in await client.until(b"\r\n\r\n")
        released.set()
        await client.until(LAST_CHUNK)


async def test_the_whole_program_buffers_nothing(tmp_path):
    head, pieces = FRAMINGS["sse"]
    script = Stepwise(head, *pieces)
    file = tmp_path / "proxy.toml"
    async with fake_workers(script) as (worker,):
        put(file, toml([worker]))
        async with program("--config", file) as running:
            await running.until_routable(worker)
            async with client_of(running.client.base_url.netloc.decode()) as client:
                await read_stepwise(client, script, pieces)
