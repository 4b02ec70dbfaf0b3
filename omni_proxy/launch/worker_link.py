"""Connects launched replicas to their workers in the fleet.

Invariant: the worker of a launched replica is cordoned except while the launched process is ready,
even if another process answers at its address.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self

import httpx
import trio

from omni_proxy.fleet.cordon_reasons import LAUNCH_CORDON
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import Prober
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.worker_drain import wait_idle

POLL_SECS = 0.2


class LaunchedWorkerLink:
    """Refers to workers by URL: the configuration store adds and removes them."""

    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        prober: Prober,
        on_state_change: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._prober = prober
        self.on_state_change = on_state_change  # of a replica
        self._open_client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._open_client is not None:
            await self._open_client.aclose()

    @property
    def _client(self) -> httpx.AsyncClient:
        """Opened when the first replica starts: most proxies launch none."""
        if self._open_client is None:
            # Connect directly to the replica: proxies of the environment are for other hosts.
            # Without TLS, httpx need not read all CA certificates, which takes long.
            self._open_client = httpx.AsyncClient(trust_env=False, verify=False)
        return self._open_client

    async def wait_membership_released(self) -> None:
        """Wait for the end of a weight sync: no process may be restarted during one."""
        await self._config_store.membership_lock.wait_released()

    def find(self, url: str) -> Worker | None:
        return self._fleet.find(url)

    def cordon(self, url: str) -> None:
        worker = self._fleet.find(url)
        if worker is not None and LAUNCH_CORDON not in worker.cordon_reasons:
            self._fleet.cordon(worker, LAUNCH_CORDON)

    def process_exited(self, url: str, reason: str) -> None:
        worker = self._fleet.find(url)
        if worker is not None:
            self._fleet.process_exited(worker, reason, _now())

    def mark_dead(self, url: str) -> None:
        """The replica is never restarted, so it is not probed until an operator revives it."""
        worker = self._fleet.find(url)
        if worker is not None:
            self._fleet.mark_dead(worker, _now())

    async def wait_ready(self, url: str, timeout_secs: float) -> str:
        """Poll the health endpoint until it answers 200; "", or the last failure at the timeout.

        A timeout of 0 s means none.
        """
        failure = ""
        with trio.move_on_after(timeout_secs or math.inf):
            while True:
                failure = await self._poll_health(url)
                if not failure:
                    return ""
                await trio.sleep(POLL_SECS)
        return f"not ready after {timeout_secs:g} s: {failure}"

    async def set_ready(self, url: str) -> Worker | None:
        """Put the worker into rotation, with the number of probes that this needs.

        A worker that an operator declared dead stays dead.
        """
        worker = self._fleet.find(url)
        if worker is not None:
            if not worker.health.declared_dead:
                self._fleet.revive(worker, _now())
            self._fleet.uncordon(worker, LAUNCH_CORDON)
            for _ in range(self._config_store.config.health.success_threshold):
                await self._prober.probe_once(worker)
        return worker

    async def drain(self, worker: Worker) -> None:
        """Wait until the worker is idle, at most for `server.drain_timeout_secs`.

        Takes the worker itself: one that was removed is no longer found by its URL.
        """
        with trio.move_on_after(self._config_store.config.server.drain_timeout_secs):
            await self._fleet.await_replicated()
            await wait_idle([worker], poll_secs=POLL_SECS)

    async def _poll_health(self, url: str) -> str:
        """The reason why the replica is not ready; "" if it is."""
        health = self._config_store.config.health
        try:
            response = await self._client.get(url + health.endpoint, timeout=health.timeout_secs)
        except httpx.HTTPError as error:
            return f"GET {health.endpoint}: {str(error) or type(error).__name__}"
        if response.status_code == httpx.codes.OK:
            return ""
        return f"GET {health.endpoint} answered {response.status_code}"


def _now() -> datetime:
    return datetime.now(UTC)
