"""Asks engines whether they serve the prefill or the decode leg of requests, where no role is
configured.

A worker is asked when it becomes healthy, when another process answers under its URL, and when its
role is configured no more. While the fleet has prefill or decode workers it gets no request until
it was asked once: a regular request would fail at an engine that serves one leg. Invariant: what
can't be asked is regular; the call is repeated with back-off while the worker is healthy.
Source: features.md 2.1 (`disaggregation_mode` of SGLang's /server_info).
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from omni_proxy.backoff import Backoff
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import ReportedRole, Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, CallResult, call_worker

_log = logging.getLogger(__name__)

CORDON: Final = "role"  # the cordon reason of a worker whose role is asked for
PATHS: Final = ("/server_info", "/get_server_info")
MAX_BYTES: Final = 8 * 1024 * 1024
TIMEOUT_SECS: Final = 15.0  # an engine's first answer may take long
RETRY_SECS: Final = 1.0  # after a failed call, doubling
MAX_RETRY_SECS: Final = 60.0
MAX_CALLS: Final = 64  # at a time, when a whole fleet starts


class EngineRoles:
    """`run` asks, each worker in a task of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._nursery: trio.Nursery | None = None
        self._latest: dict[Worker, object] = {}  # token of the latest task; it replaces others
        self._known: set[Worker] = set()  # those that were asked
        self._slots = trio.CapacityLimiter(MAX_CALLS)
        fleet.watch_members(self._follow_members)
        fleet.watch_health(lambda worker, before: self._ask(worker))
        fleet.watch_cache_cleared(self._ask)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for worker in self._fleet.workers:
                    self._ask(worker)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for worker in list(self._latest):
                self._uncordon(worker)
            self._latest.clear()

    def _follow_members(self) -> None:
        self._known.intersection_update(self._fleet.workers)
        for worker in self._fleet.workers:
            if worker not in self._known and worker not in self._latest:
                self._ask(worker)

    def _ask(self, worker: Worker) -> None:
        if self._nursery is None or not self._is_wanted(worker):
            return
        self._latest[worker] = token = object()
        if self._fleet.has_pools and worker not in self._known:
            self._fleet.cordon(worker, CORDON)
        self._nursery.start_soon(self._ask_until_known, worker, token)

    def _is_wanted(self, worker: Worker) -> bool:
        healthy = worker.health.state is Health.HEALTHY
        return healthy and not worker.configured_role and self._fleet.find(worker.url) is worker

    async def _ask_until_known(self, worker: Worker, token: object) -> None:
        backoff = Backoff(RETRY_SECS, MAX_RETRY_SECS)
        try:
            while self._latest.get(worker) is token and self._is_wanted(worker):
                async with self._slots:
                    role = await _engine_role(worker)
                if self._latest.get(worker) is not token or not self._is_wanted(worker):
                    return
                if role is not None:
                    if role != worker.reported_role:
                        _log.info("worker_role worker=%s role=%s", worker.url, role or "regular")
                    self._known.add(worker)
                    self._fleet.report_role(worker, role)
                    return
                self._known.add(worker)
                self._uncordon(worker)
                await trio.sleep(backoff.next_delay())
        finally:
            if self._latest.get(worker) is token:
                del self._latest[worker]
                self._uncordon(worker)

    def _uncordon(self, worker: Worker) -> None:
        if CORDON in worker.cordon_reasons:
            self._fleet.uncordon(worker, CORDON)


async def _engine_role(worker: Worker) -> ReportedRole | None:
    """What the engine says, "" for nothing; None if it could not be asked."""
    result = await _get(worker, PATHS[0])
    if result.status in ROUTE_ABSENT:
        result = await _get(worker, PATHS[1])
    if result.ok:
        return role_of_info(result)
    return None if result.status is None or result.status >= 500 else ""


async def _get(worker: Worker, path: str) -> CallResult:
    call = Call("GET", path, timeout_secs=TIMEOUT_SECS, max_bytes=MAX_BYTES)
    return await call_worker(worker, call)


def role_of_info(result: CallResult) -> ReportedRole:
    """SGLang's `disaggregation_mode`; "" where it is null, "null", or no such key."""
    body = result.json()
    mode = body.get("disaggregation_mode") if isinstance(body, dict) else None
    if mode == "prefill":
        return "prefill"
    return "decode" if mode == "decode" else ""
