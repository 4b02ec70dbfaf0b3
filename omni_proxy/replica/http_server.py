"""The HTTP server of a replica: listener, pipeline, client, app, and an orderly shutdown.

    listen (503 starting) ──stages ready──> serve ──signal──> drain ──> stages stop ──> return
                                              └──second signal──> cut ──┘

Invariant: when `launch_server` returns or raises, no child process is left and the port is free.
After a cut, a stage's thread may still compute: exit the process without waiting for it. Each
connection is a `HypercornConnection`: its errors don't end the server, and it is reset if it is
still open after the drain.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import wrap_app
from quart_trio import QuartTrio

from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.config import PipelineConfig
from omni_proxy.replica.pipeline.runtime import Runtime, StartError, open_pipeline
from omni_proxy.shared.asgi.hypercorn_connection import (
    HypercornConnection,
    first_leaf_error,
    protect_last_send,
)
from omni_proxy.shared.log_text import log_to_stderr
from omni_proxy.shared.watchdog import Watchdog

if TYPE_CHECKING:
    from quart_trio import QuartTrio

    from omni_proxy.replica.api.route_context import AppOptions

BACKLOG = 1024
KEEP_ALIVE_SECS = 75  # longer than proxies keep idle connections, so that they close first
HEAD_BYTES = 64 * 1024
RESET_SECS = 1.0  # for connection tasks to notice that their socket is closed

log = logging.getLogger(__name__)
# Together with the stages' stop timeout and the reset this stays below the 10 s of supervisors.
DRAIN_SECS = 5.0
# With Python's default of 5 ms, a stage that computes in Python would delay every packet.
SWITCH_SECS = 0.0005


class ListenError(Exception):
    """The address cannot be bound; the text has the reason and what to do."""


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
            log.warning(
                "replica_drain_timeout connections_reset=%d was=drain_timeout", len(self._streams)
            )
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
        except Exception as error:  # client input must not end the server (hypercorn #225)
            log.warning(
                "replica_connection_failed error=%s was=connection_failed",
                repr(first_leaf_error(error)),
            )
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
        return  # already closed


def _hypercorn_config() -> Config:
    quiet = log.getChild("hypercorn")
    quiet.setLevel(logging.WARNING)
    settings = Config()
    settings.errorlog = quiet
    settings.keep_alive_timeout = KEEP_ALIVE_SECS
    settings.h11_max_incomplete_size = HEAD_BYTES
    settings.include_server_header = False
    return settings


async def launch_server(
    pipeline_config: PipelineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_secs: float = DRAIN_SECS,
    log_level: str = "info",
    **options: Unpack[AppOptions],
) -> None:
    """Serve until SIGTERM or SIGINT; `options` are those of `create_app`.

    `model_name` defaults to the pipeline's name. Raises ListenError, PipelineConfigError, or
    StartError if a stage does not start.
    """
    log_to_stderr(log_level.upper())
    sys.setswitchinterval(SWITCH_SECS)
    options.setdefault("model_name", pipeline_config.name)
    options.setdefault("model_path", pipeline_config.model_path)
    failures: list[StartError] = []
    with bind_listener(host, port) as listener:
        try:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async with trio.open_nursery() as nursery:
                    lifecycle = _ServerLifecycle(drain_secs)
                    nursery.start_soon(lifecycle.watch_signals, signals)
                    await lifecycle.serve(pipeline_config, listener, options)
                    nursery.cancel_scope.cancel()
        except* StartError as group:
            failures += _leaves(group)
    if failures:
        raise failures[0]


@dataclass(slots=True)
class _ServerLifecycle:
    drain_secs: float
    stopping: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    runtime: Runtime | None = None

    async def watch_signals(self, signals: AsyncIterator[int]) -> None:
        """The first signal starts the drain, the second one cuts connections and stages."""
        async for number in signals:
            if self.stopping.is_set():
                log.warning(
                    "shutdown_aborted signal=%s was=second_signal", signal.Signals(number).name
                )
                self.scope.cancel()
                if self.runtime is not None:
                    self.runtime.stop_waiting()
            else:
                log.info(
                    "replica_drain_started signal=%s was=drain_started", signal.Signals(number).name
                )
                self.stopping.set()

    async def serve(
        self, config: PipelineConfig, listener: socket.socket, options: AppOptions
    ) -> None:
        with self.scope:
            async with open_pipeline(config) as (coordinator, self.runtime):
                # This thread imports the web layer while the stage threads load.
                server = ReplicaServer(_app(Client(coordinator), options), listener)
                async with trio.open_nursery() as nursery:
                    await nursery.start(server.serve)
                    nursery.start_soon(self._on_ready, listener, options)
                    await self.stopping.wait()
                    await server.drain(self.drain_secs)
                    nursery.cancel_scope.cancel()

    async def _on_ready(self, listener: socket.socket, options: AppOptions) -> None:
        """Log the address. From then on, nothing may block the event loop."""
        assert self.runtime is not None
        await self.runtime.ready.wait()
        # Weights and modules are permanent: exclude them from garbage collection, which would pause
        # the loop.
        gc.collect()
        gc.freeze()
        host, port = listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        log.info("replica_ready model=%s url=http://%s:%d", options["model_name"], address, port)
        await Watchdog().run()


def _app(client: Client, options: AppOptions) -> QuartTrio:
    from omni_proxy.replica.api.app import build_app
    from omni_proxy.replica.api.route_context import RouteContext
    from omni_proxy.replica.api.sglang import profile_routes

    context = RouteContext(client=client, **options)
    app = build_app(context)
    profile_routes.mount(app, context)
    return app


def _leaves(group: BaseExceptionGroup[StartError]) -> list[StartError]:
    leaves: list[StartError] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
