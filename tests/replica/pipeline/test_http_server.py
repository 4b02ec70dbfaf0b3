import gc
import socket
import struct
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from quart_trio import QuartTrio

from omni_proxy.replica.pipeline.http_server import (
    ListenError,
    ReplicaServer,
    _ServerLifecycle,
    bind_listener,
)
from tests.processes import open_sockets


def app_of(hold=None, reached=None):
    """`/held` responds once `hold` is set, and sets `reached` when it is requested."""
    app = QuartTrio("test")

    @app.get("/")
    async def hello():
        return "hello"

    @app.get("/held")
    async def held():
        if reached is not None:
            reached.set()
        await hold.wait()
        return "held"

    return app


@asynccontextmanager
async def dial(listener):
    async with await trio.open_tcp_stream(*listener.getsockname()[:2]) as stream:
        yield stream


async def get(stream, path="/"):
    await stream.send_all(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())


async def answer(stream):
    """All bytes up to end of file."""
    got = b""
    while data := await stream.receive_some():
        got += data
    return got


@pytest.mark.usefixtures("soon")
async def test_a_drain_answers_what_is_in_flight_and_closes_what_is_idle():
    hold, reached = trio.Event(), trio.Event()
    listener = bind_listener("127.0.0.1", 0)
    server = ReplicaServer(app_of(hold, reached), listener)
    async with trio.open_nursery() as nursery, dial_both(nursery, server, listener) as streams:
        idle, busy = streams
        await get(idle)
        got = b""
        while b"hello" not in got:
            got += await idle.receive_some()
        await get(busy, "/held")
        await reached.wait()
        nursery.start_soon(server.drain, 10)
        assert await answer(idle) == b""
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream(*busy.socket.getpeername())
        hold.set()
        assert (await answer(busy)).endswith(b"held")


@asynccontextmanager
async def dial_both(nursery, server, listener):
    await nursery.start(server.serve)
    async with dial(listener) as one, dial(listener) as other:
        yield one, other


@pytest.mark.usefixtures("soon")
async def test_what_does_not_end_is_reset_after_its_time():
    listener, reached = bind_listener("127.0.0.1", 0), trio.Event()
    server = ReplicaServer(app_of(trio.Event(), reached), listener)
    async with trio.open_nursery() as nursery, dial_both(nursery, server, listener) as streams:
        await get(streams[0], "/held")
        await reached.wait()
        nursery.start_soon(server.drain, 0.05)
        with pytest.raises(trio.BrokenResourceError):
            await answer(streams[0])


@pytest.mark.usefixtures("soon")
async def test_bytes_that_break_a_connection_do_not_end_the_server():
    listener = bind_listener("127.0.0.1", 0)
    server = ReplicaServer(app_of(), listener)
    async with trio.open_nursery() as nursery, dial_both(nursery, server, listener) as streams:
        hostile, sane = streams
        # Hypercorn's own: a byte behind an upgrade (its issue 225).
        await hostile.send_all(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\nx"
        )
        await answer(hostile)
        await get(sane)
        assert b"200" in await sane.receive_some()
        await server.drain(0)


def ends_with_a_reset(stream):
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("path", ["/", "/held"], ids=["idle", "answering"])
@pytest.mark.parametrize("leave", [lambda stream: None, ends_with_a_reset], ids=["end", "reset"])
@pytest.mark.usefixtures("soon")
async def test_a_connection_whose_client_has_left_is_closed_at_once(path, leave):
    listener = bind_listener("127.0.0.1", 0)
    server = ReplicaServer(app_of(trio.Event()), listener)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        before = open_sockets()
        for _ in range(5):
            async with dial(listener) as stream:
                await get(stream, path)
                if path == "/":
                    assert b"200" in await stream.receive_some()
                await trio.testing.wait_all_tasks_blocked(0.01)
                leave(stream)
        with trio.fail_after(30):
            while open_sockets() > before:  # noqa: ASYNC110  # the kernel rings no bell here
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("soon")
async def test_a_kept_connection_serves_another_request():
    listener = bind_listener("127.0.0.1", 0)
    server = ReplicaServer(app_of(), listener)
    async with trio.open_nursery() as nursery, dial_both(nursery, server, listener) as streams:
        for _ in range(3):
            await get(streams[0])
            got = b""
            while b"hello" not in got:
                got += await streams[0].receive_some()
        await server.drain(0)


def test_an_address_that_is_taken_is_reported_with_the_cure():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1 port {port}.*--port"):
            bind_listener("127.0.0.1", port)


def test_an_address_that_is_none_is_reported():
    with pytest.raises(ListenError, match=r"cannot listen on nowhere\.invalid port 1"):
        bind_listener("nowhere.invalid", 1)


def watchdogs():
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


@pytest.fixture(autouse=True)
def _unfrozen():
    yield
    gc.unfreeze()


async def test_a_replica_watches_its_loop_once_it_is_ready(nursery):
    ready = trio.Event()
    life = _ServerLifecycle(1.0, runtime=SimpleNamespace(ready=ready))
    before = len(watchdogs())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nursery.start_soon(life._on_ready, listener, {"model_name": "m"})
        await trio.testing.wait_all_tasks_blocked()
        assert len(watchdogs()) == before
        ready.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(watchdogs()) == before + 1
        nursery.cancel_scope.cancel()
