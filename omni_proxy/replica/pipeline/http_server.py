"""Hypercorn's HTTP connections on a public listener, each with its errors contained.

Invariant: no connection ends the server, and none outlives the drain: after it, open sockets are
reset. Each connection is a `hypercorn_connection`.
"""

from __future__ import annotations

import logging
import socket
import struct

import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import wrap_app
from quart_trio import QuartTrio

from omni_proxy.hypercorn_connection import HypercornConnection, first_leaf_error, protect_last_send

BACKLOG = 1024
KEEP_ALIVE_SECS = 75  # longer than proxies keep idle connections, so that they close first
HEAD_BYTES = 64 * 1024
RESET_SECS = 1.0  # for connection tasks to notice that their socket is closed

log = logging.getLogger(__name__)


class ListenError(Exception):
    """The address cannot be bound; the text says why and what to do."""


def bind_listener(host: str, port: int) -> socket.socket:
    """Bind the address without listening yet; raises ListenError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ListenError(
            f"cannot listen on {host} port {port}: {error.strerror}; end the other program or "
            "choose another --host or --port"
        ) from error
    return listener


class ReplicaServer:
    """One app on one listener. `drain` may be called while `serve` runs."""

    def __init__(self, app: QuartTrio, listener: socket.socket) -> None:
        self._config = _hypercorn_config()
        self._app: AppWrapper = wrap_app(protect_last_send(app), 0, "asgi")
        self._listener = listener
        self._context = WorkerContext(None)
        self._streams: set[trio.SocketStream] = set()
        self._accept_scope = trio.CancelScope()
        self._all_closed = trio.Event()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until drained or cancelled."""
        lifespan = Lifespan(self._app, self._config, {})
        self._listener.listen(BACKLOG)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            async with trio.open_nursery() as connections:
                task_status.started()
                with self._accept_scope:
                    await trio.serve_listeners(
                        self._connection, [listener], handler_nursery=connections
                    )
                await listener.aclose()
                self._check_all_closed()
            await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel()

    async def drain(self, secs: float) -> None:
        """Stop accepting, wait for requests in flight with a timeout, then reset the other
        connections.
        """
        self._accept_scope.cancel()
        await self._context.terminated.set()  # closes idle connections
        with trio.move_on_after(secs):
            await self._all_closed.wait()
        if self._streams:
            log.warning("drain_timeout connections_reset=%d", len(self._streams))
        for stream in list(self._streams):
            _reset(stream)
        with trio.move_on_after(RESET_SECS):
            await self._all_closed.wait()

    async def _connection(self, stream: trio.SocketStream) -> None:
        self._streams.add(stream)
        try:
            await HypercornConnection(
                self._app,
                self._config,
                self._context,
                ConnectionState({}),
                stream,  # type: ignore[arg-type]
            )
        except Exception as fault:  # client input must not end the server (hypercorn #225)
            log.warning("connection_failed error=%r", first_leaf_error(fault))
        finally:
            self._streams.discard(stream)
            self._check_all_closed()

    def _check_all_closed(self) -> None:
        if self._accept_scope.cancel_called and not self._streams:
            self._all_closed.set()


def _reset(stream: trio.SocketStream) -> None:
    try:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()
    except (OSError, trio.ClosedResourceError):
        return  # closed already


def _hypercorn_config() -> Config:
    quiet = log.getChild("hypercorn")
    quiet.setLevel(logging.WARNING)
    settings = Config()
    settings.errorlog = quiet
    settings.keep_alive_timeout = KEEP_ALIVE_SECS
    settings.h11_max_incomplete_size = HEAD_BYTES
    settings.include_server_header = False
    return settings
