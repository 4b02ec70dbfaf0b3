"""Hypercorn on the private Unix socket that only the door dials.

Invariant: the last piece of an answer is sent without being cancelled from inside. quart-trio's
receiver reacts to Hypercorn's `http.disconnect`, which comes before Hypercorn has ended the
exchange, by cancelling the very task that ends it; the connection would neither close nor go on.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
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
            await nursery.start(_serve, app, listener, stop)
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


async def _serve(
    app: QuartTrio,
    listener: socket.socket,
    stop: Callable[[], Awaitable[None]] | None,
    *,
    task_status: trio.TaskStatus[list[str]],
) -> None:
    await worker_serve(
        wrap_app(_ending_whole(app), 0, "asgi"),
        _settings(),
        sockets=Sockets([], [listener], []),
        shutdown_trigger=stop,
        task_status=task_status,
    )


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
