"""The lifecycle of a replica: pipeline, client, app, listener, and an orderly shutdown.

    listen (503 starting) ──stages ready──> serve ──signal──> drain ──> stages stop ──> return
                                              └──second signal──> cut ──┘
Invariant: when `launch_server` returns or raises, no child process is left and the port is free. A
stage thread that was cut may still compute: end the process without waiting for it.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import trio

from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.config import PipelineConfig
from omni_proxy.replica.pipeline.hosting.runtime import Runtime, StartError, open_pipeline
from omni_proxy.replica.pipeline.hosting.stage_runner import LOG_FORMAT
from omni_proxy.replica.pipeline.http_server import ReplicaServer, bind_listener
from omni_proxy.watchdog import Watchdog

if TYPE_CHECKING:
    from quart_trio import QuartTrio

    from omni_proxy.replica.api.route_context import AppOptions

# Together with the stages' stop timeout and the reset this stays below the 10 s of supervisors.
DRAIN_SECS = 5.0
# With Python's default of 5 ms, a stage that computes in Python would delay every packet.
SWITCH_SECS = 0.0005

log = logging.getLogger(__name__)


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
    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT)
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
        """The first signal drains, the second one ends at once."""
        async for number in signals:
            if self.stopping.is_set():
                log.warning("second_signal action=cut_connections")
                self.scope.cancel()
                if self.runtime is not None:
                    self.runtime.stop_waiting()
            else:
                log.info("draining signal=%s", signal.Signals(number).name)
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
        """Log the address; from then on nothing may block the loop, as loading and imports do."""
        assert self.runtime is not None
        await self.runtime.ready.wait()
        # Weights and modules are permanent: exclude them from garbage collection, which would pause
        # the loop.
        gc.collect()
        gc.freeze()
        host, port = listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        log.info("%s is served at http://%s:%d", options["model_name"], address, port)
        await Watchdog().run()


def _app(client: Client, options: AppOptions) -> QuartTrio:
    from omni_proxy.replica.api.app import build_app
    from omni_proxy.replica.api.route_context import RouteContext
    from omni_proxy.replica.profiling import profile_routes as profiling

    context = RouteContext(client=client, **options)
    app = build_app(context)
    profiling.mount(app, context)
    return app


def _leaves(group: BaseExceptionGroup[StartError]) -> list[StartError]:
    found: list[StartError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
