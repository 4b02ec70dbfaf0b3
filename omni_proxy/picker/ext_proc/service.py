"""Envoy's external processor as a service of the running program: its server, by the configuration.

Invariant: a change of `[picker] grpc_listen` opens the new address before the old one drains, and
limits of bodies are those of the time when the server began.
"""

from __future__ import annotations

from typing import Final

import trio

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.picker.ext_proc.grpc_server import GrpcServer, Limits
from omni_proxy.picker.ext_proc.picks import EnvoyPicks
from omni_proxy.picker.picker import Picker
from omni_proxy.runtime_config.config_store import ConfigStore

UNBOUNDED_SECS: Final = 86400.0  # to drain, where `drain_timeout_secs` is 0


class EnvoyService:
    def __init__(
        self, picker: Picker, services: ExchangeServices, config_store: ConfigStore
    ) -> None:
        self._picker = picker
        self._services = services
        self._config_store = config_store
        self._changed = trio.Event()
        self._servers: list[GrpcServer] = []  # the newest is the last one
        self._ended = trio.Event()  # set, and replaced, when a server has ended
        self._shared = False  # another program listens at the same address
        config_store.subscribe(self._follow_config)

    def status(self) -> dict[str, object]:
        return {
            "grpc_listen": self._servers[-1].address if self._servers else None,
            "streams": sum(server.streams for server in self._servers),
        }

    def take_over(self) -> None:
        """From another program, which listens until this one does."""
        self._shared = True

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Raises OSError where it can't listen."""
        async with trio.open_nursery() as nursery:
            picks = EnvoyPicks(self._picker, self._services, nursery)
            while True:
                self._changed = trio.Event()
                server = await self._open(nursery, picks)
                task_status.started()
                await self._changed.wait()
                if server is not None:
                    server.stop(self._drain_secs())

    async def _open(self, nursery: trio.Nursery, picks: EnvoyPicks) -> GrpcServer | None:
        config = self._config_store.config
        if not config.picker.grpc_listen:
            return None
        limits = Limits(config.server.max_payload_size, config.server.max_held_bytes)
        server = GrpcServer(config.picker.grpc_listen, limits, picks, shared=self._shared)
        self._shared = False
        await nursery.start(self._run, server)
        return server

    async def _run(self, server: GrpcServer, task_status: trio.TaskStatus[None]) -> None:
        self._servers.append(server)
        try:
            await server.run(task_status=task_status)
        finally:
            self._servers.remove(server)
            self._ended.set()
            self._ended = trio.Event()

    def begin_drain(self) -> None:
        """Accept no new stream."""
        for server in self._servers:
            server.stop(self._drain_secs())

    async def drained(self) -> None:
        """The same; until the last stream has ended. The caller's scope bounds it."""
        self.begin_drain()
        while self._servers:
            await self._ended.wait()

    def _drain_secs(self) -> float:
        return self._config_store.config.server.drain_timeout_secs or UNBOUNDED_SECS

    def _follow_config(self, old: Config, new: Config) -> None:
        if old.picker.grpc_listen != new.picker.grpc_listen:
            self._changed.set()
