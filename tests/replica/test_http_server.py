import gc
import signal
import socket
import struct
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from quart_trio import QuartTrio

from omni_proxy.replica.http_server import (
    ListenError,
    ReplicaServer,
    _ServerLifecycle,
    bind_listener,
)
from tests.processes import open_sockets


def app_of(hold=None, reached=None):
    """An app whose `/held` sets `reached` when it is requested, and responds once `hold` is set."""
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


async def read_all(stream):
    """All bytes up to the end of the stream."""
    received = b""
    while data := await stream.receive_some():
        received += data
    return received


@pytest.mark.usefixtures("soon")
async def test_a_drain_answers_requests_in_flight_and_closes_idle_connections():
    hold, reached = trio.Event(), trio.Event()
    listener = bind_listener("127.0.0.1", 0)
    server = ReplicaServer(app_of(hold, reached), listener)
    async with trio.open_nursery() as nursery, dial_both(nursery, server, listener) as streams:
        idle, busy = streams
        await get(idle)
        received = b""
        while b"hello" not in received:
            received += await idle.receive_some()
        await get(busy, "/held")
        await reached.wait()
        nursery.start_soon(server.drain, 10)
        assert await read_all(idle) == b""
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream(*busy.socket.getpeername())
        hold.set()
        assert (await read_all(busy)).endswith(b"held")


@asynccontextmanager
async def dial_both(nursery, server, listener):
    await nursery.start(server.serve)
    async with dial(listener) as first, dial(listener) as second:
        yield first, second


@pytest.mark.usefixtures("soon")
async def test_a_connection_that_does_not_end_is_reset_after_the_drain_timeout():
    listener, reached = bind_listener("127.0.0.1", 0), trio.Event()
    server = ReplicaServer(app_of(trio.Event(), reached), listener)
    async with trio.open_nursery() as nursery, dial_both(nursery, server, listener) as streams:
        await get(streams[0], "/held")
        await reached.wait()
        nursery.start_soon(server.drain, 0.05)
        with pytest.raises(trio.BrokenResourceError):
            await read_all(streams[0])


@pytest.mark.usefixtures("soon")
async def test_bytes_that_break_a_connection_do_not_end_the_server():
    listener = bind_listener("127.0.0.1", 0)
    server = ReplicaServer(app_of(), listener)
    async with trio.open_nursery() as nursery, dial_both(nursery, server, listener) as streams:
        broken, healthy = streams
        # Hypercorn fails on a byte after an upgrade request (its issue 225).
        await broken.send_all(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\nx"
        )
        await read_all(broken)
        await get(healthy)
        assert b"200" in await healthy.receive_some()
        await server.drain(0)


def reset_on_close(stream):
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("path", ["/", "/held"], ids=["idle", "answering"])
@pytest.mark.parametrize("leave", [lambda stream: None, reset_on_close], ids=["end", "reset"])
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
            while open_sockets() > before:  # noqa: ASYNC110  # a closed socket cannot be awaited
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("soon")
async def test_a_kept_alive_connection_serves_further_requests():
    listener = bind_listener("127.0.0.1", 0)
    server = ReplicaServer(app_of(), listener)
    async with trio.open_nursery() as nursery, dial_both(nursery, server, listener) as streams:
        for _ in range(3):
            await get(streams[0])
            received = b""
            while b"hello" not in received:
                received += await streams[0].receive_some()
        await server.drain(0)


def test_the_error_about_an_address_in_use_names_the_option():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1 port {port}.*--port"):
            bind_listener("127.0.0.1", port)


def test_an_address_that_does_not_resolve_is_reported():
    with pytest.raises(ListenError, match=r"cannot listen on nowhere\.invalid port 1"):
        bind_listener("nowhere.invalid", 1)


def watchdogs():
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


@pytest.fixture(autouse=True)
def _unfrozen():
    yield
    gc.unfreeze()


async def test_the_watchdog_starts_when_the_replica_is_ready(nursery):
    ready = trio.Event()
    lifecycle = _ServerLifecycle(1.0, runtime=SimpleNamespace(ready=ready))
    before = len(watchdogs())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nursery.start_soon(lifecycle._on_ready, listener, {"model_name": "m"})
        await trio.testing.wait_all_tasks_blocked()
        assert len(watchdogs()) == before
        ready.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(watchdogs()) == before + 1
        nursery.cancel_scope.cancel()


async def test_a_second_signal_aborts_the_shutdown(caplog):
    async def signals():
        yield signal.SIGTERM
        assert lifecycle.stopping.is_set()
        assert not lifecycle.scope.cancel_called
        yield signal.SIGINT

    lifecycle = _ServerLifecycle(1.0)
    await lifecycle.watch_signals(signals())
    assert lifecycle.scope.cancel_called
    assert "shutdown_aborted signal=SIGINT" in caplog.text
