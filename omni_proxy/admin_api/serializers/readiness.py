"""Whether the proxy can serve new requests, and if not why: for /ready, the feed and /metrics.

Invariant: all three report the same. A worker whose engine is paused does not count, even if it is
routable ([routing] while_paused = "pass"): its requests would hang. Prefill and decode workers
count if two of them pair, or if a decode worker may serve whole requests (fallback).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from omni_proxy.admin_api.services import Services
from omni_proxy.fleet.cordon_reasons import PAUSED
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


def unready(services: Services) -> str:
    """The reason why the proxy is not ready, in one word; "" if it is ready."""
    if services.data_plane.draining or services.leaving():
        return LEAVING
    if is_opening(services):
        return OPENING
    if services.cluster is not None and services.cluster.refuses:
        return STORE_LOST
    pauses = services.weight_operations.journal.pauses()
    workers = services.fleet.workers
    routable = [worker for worker in workers if worker.routable]
    if _can_serve(services, [worker for worker in routable if worker.url not in pauses]):
        return ""
    paused = [worker for worker in workers if _is_only_paused(worker, pauses)]
    if paused and _can_serve(services, [*routable, *paused]):
        return ALL_PAUSED
    return NO_PAIR if routable else NO_WORKER


def _can_serve(services: Services, workers: Iterable[Worker]) -> bool:
    """Whether these workers can serve; prefill and decode workers only in pairs."""
    rules = services.config_store.config.routing.disaggregation
    return can_serve(workers, fallback=rules.fallback == "decode")


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


def is_opening(services: Services) -> bool:
    """Whether a worker of the command line still waits for its first probes.

    Only in the dialects of sglang-router and vllm-router, whose users read a 200 as "all given
    workers are in rotation", and at most for the time limit of a probe.
    """
    if services.dialect == "omni":
        return False
    if time.monotonic() - services.started > services.config_store.config.health.timeout_secs:
        return False
    workers = (services.fleet.find(url) for url in services.given)
    return any(worker is not None and _awaits_first_probes(worker) for worker in workers)


def describe_reason(services: Services, reason: str) -> str:
    """A sentence without names of clients, so that it needs no key."""
    if reason == LEAVING:
        return "the proxy is shutting down"
    if reason == OPENING:
        return "the first probes of the given workers have not ended"
    if reason == NO_WORKER:
        return "no worker takes requests" if services.fleet.workers else "there is no worker"
    if reason == NO_PAIR:
        return "no prefill and decode worker that take requests make a pair"
    if reason == STORE_LOST:
        return "the store of the cluster can't be reached ([cluster] on_loss is refuse)"
    since = min(pause.at for pause in services.weight_operations.journal.pauses().values())
    when = f" since {since}" if since else ""
    return f"every worker that could take requests is paused{when}: {HOW_TO_CONTINUE}"
