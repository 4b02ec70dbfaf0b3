"""Whether the proxy can serve new requests, and if not why: for /ready, the feed and /metrics.

Invariant: all three report the same. A worker whose engine is paused does not count, even if it is
routable ([routing] while_paused = "pass"): its requests would hang. Prefill and decode workers
count if two of them pair, or if a decode worker may serve whole requests (fallback). For /health a
worker counts also while an operation on its weights keeps requests from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from omni_proxy.admin_api.services import Services
from omni_proxy.fleet.cordon_reasons import PAUSED, WEIGHT_CORDONS
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.partners import can_serve
from omni_proxy.weight_sync.protocol.journal import PauseRecord

LEAVING: Final = "leaving"
OPENING: Final = "first_probes"
ALL_PAUSED: Final = "paused"
NO_WORKER: Final = "no_routable_worker"
NO_PAIR: Final = "no_pair"
STORE_LOST: Final = "cluster_store_lost"
HOW_TO_CONTINUE: Final = "`omni-proxy weights continue` (POST /continue_generation) ends it"


class Readiness:
    def __init__(self, services: Services) -> None:
        self._fleet = services.workers.fleet
        self._config_store = services.config_store
        self._data_plane = services.data_plane
        self._journal = services.weight_operations.journal
        self._cluster = services.cluster
        self._process = services.process

    def reason(self) -> str:
        """The reason why the proxy is not ready, in one word; "" if it is ready."""
        if self._data_plane.draining or self._process.leaving():
            return LEAVING
        if self.is_opening():
            return OPENING
        if self._cluster is not None and self._cluster.refuses:
            return STORE_LOST
        pauses = self._journal.pauses()
        workers = self._fleet.workers
        routable = [worker for worker in workers if worker.routable]
        if self._can_serve([worker for worker in routable if worker.url not in pauses]):
            return ""
        paused = [worker for worker in workers if _is_only_paused(worker, pauses)]
        if paused and self._can_serve([*routable, *paused]):
            return ALL_PAUSED
        return NO_PAIR if routable else NO_WORKER

    def _can_serve(self, workers: Iterable[Worker], *, same_version: bool = True) -> bool:
        """Whether these workers can serve; prefill and decode workers only in pairs."""
        fallback = self._config_store.config.routing.disaggregation.fallback == "decode"
        return can_serve(workers, fallback=fallback, same_version=same_version)

    def is_opening(self) -> bool:
        """Whether a worker of the command line still waits for its first probes.

        Only in the dialects of sglang-router and vllm-router, whose users read a 200 as "all given
        workers are in rotation", and at most for the time limit of a probe.
        """
        startup = self._config_store.startup
        if startup.dialect == "omni":
            return False
        secs = time.monotonic() - self._process.started
        if secs > self._config_store.config.health.timeout_secs:
            return False
        workers = (self._fleet.find(url) for url in startup.given_urls)
        return any(worker is not None and _awaits_first_probes(worker) for worker in workers)

    def is_healthy(self) -> bool:
        """Whether enough workers are healthy, even if they take no requests during an operation on
        their weights."""
        # Healthy even without workers: scripts wait for this before engines register.
        if self._config_store.startup.dialect != "omni" and not self._fleet.had_workers:
            return True
        well = [worker for worker in self._fleet.workers if _is_serving(worker)]
        # During an update the versions differ.
        return self._can_serve(well, same_version=False) and not self.is_opening()

    def describe(self, reason: str) -> str:
        """A sentence without names of clients, so that it needs no key."""
        if reason == LEAVING:
            return "the proxy is shutting down"
        if reason == OPENING:
            return "the first probes of the given workers have not ended"
        if reason == NO_WORKER:
            return "no worker takes requests" if self._fleet.workers else "there is no worker"
        if reason == NO_PAIR:
            return "no prefill and decode worker that take requests make a pair"
        if reason == STORE_LOST:
            return "the store of the cluster can't be reached ([cluster] on_loss is refuse)"
        since = min(pause.at for pause in self._journal.pauses().values())
        when = f" since {since}" if since else ""
        return f"every worker that could take requests is paused{when}: {HOW_TO_CONTINUE}"


def _is_serving(worker: Worker) -> bool:
    healthy = worker.health.state is Health.HEALTHY
    return healthy and not worker.disabled and worker.cordon_reasons <= WEIGHT_CORDONS


def _is_only_paused(worker: Worker, pauses: dict[str, PauseRecord]) -> bool:
    """Whether the worker would take requests if its engine were not paused."""
    healthy = worker.health.state is Health.HEALTHY
    return (
        worker.url in pauses
        and healthy
        and not worker.disabled
        and worker.cordon_reasons <= {PAUSED}
    )


def _awaits_first_probes(worker: Worker) -> bool:
    """Whether no probe has ended yet, or only successful ones, but too few."""
    health = worker.health
    return health.state is Health.UNKNOWN and not health.consecutive_failures
