"""Hypercorn on the private Unix socket that only the data plane connects to.

Invariant: a failed connection does not end the server. Each one is a
`HypercornConnection`.
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
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, LifespanState
from hypercorn.utils import wrap_app
from quart_trio import QuartTrio

from omni_proxy.shared.asgi.hypercorn_connection import (
    HypercornConnection,
    first_leaf_error,
    protect_last_send,
)

BACKLOG = 1024
# The data plane drops an idle connection after 30 s, long before this: no race.
KEEP_ALIVE_SECS = 3600
GRACE_SECS = 5
HEAD_BYTES = 128 * 1024  # twice the data plane's limit: a head that it passed is never refused here

log = logging.getLogger(__name__)


async def serve(
    app: QuartTrio,
    socket_path: str | os.PathLike[str],
    *,
    stop: Callable[[], Awaitable[None]] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` returns, then finish requests in flight. Cancelling it drops them."""
    path = Path(socket_path)
    listener = _listen(path)
    try:
        async with trio.open_nursery() as nursery:
            accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
            await nursery.start(HypercornServer(app).serve, accepting, stop or trio.sleep_forever)
            task_status.started()
    finally:
        listener.close()
        _unlink_own(path)


def _listen(path: Path) -> socket.socket:
    _unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(BACKLOG)
    return listener


def _unlink_own(path: Path) -> None:
    """Remove the socket, unless it now links to the admin API of a program that took over."""
    if not path.is_symlink():
        _unlink(path)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


class HypercornServer:
    """Serves one app on the connections of a listener."""

    def __init__(self, app: QuartTrio) -> None:
        self._app: AppWrapper = wrap_app(protect_last_send(app), 0, "asgi")
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
        """Serve until `stop` returns; requests in flight then have GRACE_SECS to end."""
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
            await HypercornConnection(
                self._app,
                self._config,
                self._context,
                state,
                stream,  # type: ignore[arg-type]
            )
        except Exception as error:  # any fault ends this connection only (hypercorn #225)
            log.warning("admin_connection_failed error=%s", repr(first_leaf_error(error)))


def _settings() -> Config:
    quiet = log.getChild("hypercorn")
    quiet.setLevel(logging.WARNING)  # it would log the private socket as a URL
    settings = Config()
    settings.errorlog = quiet
    settings.keep_alive_timeout = KEEP_ALIVE_SECS
    settings.graceful_timeout = GRACE_SECS
    settings.h11_max_incomplete_size = HEAD_BYTES
    settings.include_server_header = False
    settings.include_date_header = False
    return settings
