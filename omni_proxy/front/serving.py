"""Hypercorn on the private Unix socket that only the door dials.

Invariant: the last piece of an answer is sent without being cancelled from inside. quart-trio's
receiver reacts to Hypercorn's `http.disconnect`, which comes before Hypercorn has ended the
exchange, by cancelling the very task that ends it; the connection would neither close nor go on.
No connection ends the server, and one that the door has closed is closed here at once.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    ConnectionState,
    LifespanState,
    Scope,
)
from hypercorn.utils import wrap_app
from quart_trio import QuartTrio

BACKLOG = 1024
# The door drops an idle connection after 30 s, long before this: the two never race.
KEEP_ALIVE_SECS = 3600
GRACE_SECS = 5
LAST_SEND_SECS = 30
HEAD_BYTES = 128 * 1024  # twice what the door lets in: a head it passed is never refused here

log = logging.getLogger(__name__)


async def serve(
    app: QuartTrio,
    socket_path: str | os.PathLike[str],
    *,
    stop: Callable[[], Awaitable[None]] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` returns (what is in flight is answered) or until cancelled (it is not)."""
    path = Path(socket_path)
    listener = _listen(path)
    try:
        async with trio.open_nursery() as nursery:
            accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
            await nursery.start(Server(app).serve, accepting, stop or trio.sleep_forever)
            task_status.started()
    finally:
        listener.close()
        _unlink(path)


def _listen(path: Path) -> socket.socket:
    _unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(BACKLOG)
    return listener


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


class Connection(TCPServer):
    """Hypercorn's would wait out its keep-alive timeout for the next request of a client that left.

    What is just being answered is told of it by Hypercorn, and ends by itself.
    """

    _left = False

    async def protocol_send(self, event: Event) -> None:
        if not (self._left and isinstance(event, Updated)):  # else it would be idle once more
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        self._left = True
        await self.idle_task.stop()


class Server:
    """One app, and the connections that it answers."""

    def __init__(self, app: QuartTrio) -> None:
        self._app: AppWrapper = wrap_app(_ending_whole(app), 0, "asgi")
        self._config = _settings()
        self._context = WorkerContext(None)
        self._state: LifespanState = {}

    async def serve(
        self,
        listener: trio.SocketListener,
        stop: Callable[[], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """Until `stop` returns; what is in flight then has GRACE_SECS."""
        lifespan = Lifespan(self._app, self._config, self._state)
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            async with trio.open_nursery() as connections:
                task_status.started()
                async with trio.open_nursery() as accepting:
                    accepting.start_soon(
                        partial(
                            trio.serve_listeners,
                            self._connection,
                            [listener],
                            handler_nursery=connections,
                        )
                    )
                    await stop()
                    accepting.cancel_scope.cancel()
                await self._context.terminated.set()  # idle connections close
                connections.cancel_scope.deadline = trio.current_time() + GRACE_SECS
            await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel()

    async def _connection(self, stream: trio.SocketStream) -> None:
        state = ConnectionState(self._state.copy())
        try:
            await Connection(
                self._app,
                self._config,
                self._context,
                state,
                stream,  # type: ignore[arg-type]
            )
        except Exception as fault:  # it is one connection's, whatever it is (hypercorn #225)
            log.warning("a connection from the door ended by a fault: %r", fault)


def _settings() -> Config:
    quiet = log.getChild("hypercorn")
    quiet.setLevel(logging.WARNING)  # it announces a private socket as something to visit
    settings = Config()
    settings.errorlog = quiet
    settings.keep_alive_timeout = KEEP_ALIVE_SECS
    settings.graceful_timeout = GRACE_SECS
    settings.h11_max_incomplete_size = HEAD_BYTES
    settings.include_server_header = False
    settings.include_date_header = False
    return settings


def _ending_whole(
    app: QuartTrio,
) -> Callable[[Scope, ASGIReceiveCallable, ASGISendCallable], Awaitable[None]]:
    async def call(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_whole(message: ASGISendEvent) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body")
            if not last:
                await send(message)
                return
            with trio.move_on_after(LAST_SEND_SECS, shield=True):
                await send(message)

        await app(scope, receive, send_whole)

    return call
