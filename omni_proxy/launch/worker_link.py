"""What the fleet hears of the replicas that we launch.

Invariant: the worker of a launched replica is held out of routing except while our own process for
it is ready, whatever else may answer at its address.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self

import httpx
import trio

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import LAUNCH_CORDON, Worker
from omni_proxy.health.prober import Prober
from omni_proxy.runtime_config.config_store import ConfigStore

HOLD = LAUNCH_CORDON
POLL_SECS = 0.2


class LaunchedWorkerLink:
    """Speaks of workers by URL: the keeper owns them, they come and go with the configuration."""

    def __init__(
        self, fleet: Fleet, config_store: ConfigStore, prober: Prober, moved: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._prober = prober
        self.moved = moved  # a place has entered another state
        # Straight to the replica: a proxy of the environment is meant for the world outside.
        self._client = httpx.AsyncClient(trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def until_thawed(self) -> None:
        """No process is started anew under a weight sync that counts on its ranks."""
        await self._config_store.membership_lock.wait_released()

    def find(self, url: str) -> Worker | None:
        return self._fleet.find(url)

    def hold(self, url: str) -> None:
        worker = self._fleet.find(url)
        if worker is not None and HOLD not in worker.cordon_reasons:
            self._fleet.cordon(worker, HOLD)

    def lost(self, url: str, reason: str) -> None:
        worker = self._fleet.find(url)
        if worker is not None:
            self._fleet.process_exited(worker, reason, _now())

    def give_up(self, url: str) -> None:
        """Nobody will restart it: nobody need probe it, until an operator revives it."""
        worker = self._fleet.find(url)
        if worker is not None:
            self._fleet.mark_dead(worker, _now())

    async def until_ready(self, url: str, timeout_secs: float) -> str:
        """Wait for the health endpoint's 200; returns "", or what it said last when time was up."""
        found = ""
        with trio.move_on_after(timeout_secs or math.inf):
            while True:
                found = await self._ask(url)
                if not found:
                    return ""
                await trio.sleep(POLL_SECS)
        return f"not ready after {timeout_secs:g} s: {found}"

    async def ready(self, url: str) -> Worker | None:
        """Back to routing, with as many probes as that takes: its readiness has been seen.

        One that a person declared dead stays dead, whatever process is behind it.
        """
        worker = self._fleet.find(url)
        if worker is not None:
            if not worker.health.declared_dead:
                self._fleet.revive(worker, _now())
            self._fleet.uncordon(worker, HOLD)
            for _ in range(self._config_store.config.health.success_threshold):
                await self._prober.probe_once(worker)
        return worker

    async def until_idle(self, worker: Worker) -> None:
        """Wait for the end of what runs on it, no longer than a drain may take.

        Takes the worker itself: one that the configuration dropped is no longer found by its URL.
        """
        with trio.move_on_after(self._config_store.config.server.drain_timeout_secs):
            await self._fleet.await_replicated()
            while worker.in_flight:  # noqa: ASYNC110  # the door counts in plain ints, it rings no bell
                await trio.sleep(POLL_SECS)

    async def _ask(self, url: str) -> str:
        health = self._config_store.config.health
        try:
            answer = await self._client.get(url + health.endpoint, timeout=health.timeout_secs)
        except httpx.HTTPError as error:
            return f"GET {health.endpoint}: {str(error) or type(error).__name__}"
        if answer.status_code == httpx.codes.OK:
            return ""
        return f"GET {health.endpoint} answered {answer.status_code}"


def _now() -> datetime:
    return datetime.now(UTC)
