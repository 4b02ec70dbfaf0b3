"""The service for Envoy's external processor: runs gRPC servers as the configuration requires.

Invariant: a change of `[picker] grpc_listen` or of its TLS opens a new server before the old one
drains; if the new one can't listen, the old one continues. A server keeps the body limits that were
configured when it started.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final, Protocol

import trio

from omni_proxy.config.schema import Config, ServerConfig
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.picker.ext_proc.grpc_server import (
    AsyncioThread,
    GrpcServer,
    GrpcTls,
    Limits,
    ListenSettings,
)
from omni_proxy.picker.ext_proc.picks import EnvoyPicks
from omni_proxy.picker.picker import Picker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.system.tls_contexts import picker_tls

_log = logging.getLogger(__name__)

UNBOUNDED_SECS: Final = 86400.0  # drain timeout if `drain_timeout_secs` is 0


class _RunServer(Protocol):
    """Runs a server until it has ended."""

    async def __call__(self, server: GrpcServer, *, task_status: trio.TaskStatus[None]) -> None: ...


class EnvoyService:
    def __init__(
        self, picker: Picker, services: ExchangeServices, config_store: ConfigStore
    ) -> None:
        self._picker = picker
        self._services = services
        self._config_store = config_store
        self._changed = trio.Event()
        self._servers: list[GrpcServer] = []  # the newest one is last
        self._ended = trio.Event()  # set, and replaced, when a server has ended
        self._shared = False  # another program may still listen at the same address
        config_store.subscribe(self._follow_config)

    def status(self) -> dict[str, object]:
        return {
            "grpc_listen": self._servers[-1].address if self._servers else None,
            "streams": sum(server.streams for server in self._servers),
        }

    def take_over(self) -> None:
        """Share the address with another program, which listens until this one does."""
        self._shared = True

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Raises OSError if the first server can't listen."""
        thread, refusal = AsyncioThread(), None
        async with trio.open_nursery() as outer:
            await outer.start(thread.run)
            try:
                async with trio.open_nursery() as nursery:
                    picks = EnvoyPicks(self._picker, self._services, nursery)
                    refusal = await self._replace(nursery, partial(self._run, thread), picks)
                    while refusal is None:
                        task_status.started()
                        await self._changed.wait()
                        await self._replace(nursery, partial(self._run, thread), picks)
            finally:
                thread.stop()
        if refusal is not None:
            raise refusal

    async def _replace(
        self, nursery: trio.Nursery, run: _RunServer, picks: EnvoyPicks
    ) -> OSError | None:
        """Open a server with the current configuration, then drain the others.

        If it can't listen, returns the error; the others continue then.
        """
        self._changed = trio.Event()
        before = list(self._servers)
        try:
            await self._open(nursery, run, picks)
        except OSError as error:
            _log.error("grpc_listen_failed error=%s was=grpc_listen_refused", error)
            return error
        for server in before:
            server.stop(self._drain_secs())
        return None

    async def _open(self, nursery: trio.Nursery, run: _RunServer, picks: EnvoyPicks) -> None:
        config = self._config_store.config
        address, files = config.picker.grpc_listen, picker_tls(config)
        if not address:
            return
        limits = Limits(config.server.max_payload_size, config.server.max_held_bytes)
        shared = self._shared or any(server.address == address for server in self._servers)
        self._shared = False
        tls = GrpcTls(files) if files is not None else None
        server = GrpcServer(ListenSettings(address, tls, shared), limits, picks)
        await nursery.start(run, server)

    async def _run(
        self, thread: AsyncioThread, server: GrpcServer, *, task_status: trio.TaskStatus[None]
    ) -> None:
        self._servers.append(server)
        try:
            await server.run(thread, task_status=task_status)
        finally:
            self._servers.remove(server)
            self._ended.set()
            self._ended = trio.Event()

    def begin_drain(self) -> None:
        """Accept no new streams."""
        for server in self._servers:
            server.stop(self._drain_secs())

    async def drained(self) -> None:
        """`begin_drain`, and wait until the last stream has ended. The caller sets a timeout."""
        self.begin_drain()
        while self._servers:
            await self._ended.wait()

    def _drain_secs(self) -> float:
        return self._config_store.config.server.drain_timeout_secs or UNBOUNDED_SECS

    def _follow_config(self, old: Config, new: Config) -> None:
        if _listener(old) != _listener(new):
            self._changed.set()


def _listener(config: Config) -> tuple[str, ServerConfig | None]:
    return config.picker.grpc_listen, picker_tls(config)
