"""Asks engines how many data-parallel ranks they have, for workers with `ranks = "auto"`.

A worker is asked when it gets healthy, and when another process answers under its URL: it may have
been started with another number. Invariant: until an engine has said it, and while it can't be
asked, the number that is known stays (at first 1: the engine spreads its requests itself). A failed
call is repeated with back-off while the worker is healthy.
Sources: features.md 8 (`dp_size` of SGLang's /server_info), captures of vLLM 0.32 (one series for
each engine in /metrics; /server_info in development mode only).
"""

from __future__ import annotations

import logging
import re
from typing import Final

import trio

from omni_proxy.backoff import Backoff
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call, CallResult, call_worker

_log = logging.getLogger(__name__)

INFO_PATH: Final = "/server_info?config_format=json"
OLD_INFO_PATH: Final = "/get_server_info"
METRICS_PATH: Final = "/metrics"
MAX_BYTES: Final = 8 * 1024 * 1024
TIMEOUT_SECS: Final = 15.0  # an engine's first answer may take long
RETRY_SECS: Final = 1.0  # after a failed call, doubling
MAX_RETRY_SECS: Final = 30.0
MAX_RANKS: Final = 1024  # as the key `ranks` takes
_ENGINE_SERIES: Final = re.compile(
    rb'^vllm:num_requests_running\{[^}]*engine="(\d+)"', re.MULTILINE
)


class EngineRanks:
    """`run` asks for all workers that `fleet` has, each in a task of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting: set[Worker] = set()
        self._asked: set[Worker] = set()  # by a task that runs
        self._changed = trio.Event()
        fleet.watch_health(lambda worker, before: self._ask(worker))
        fleet.watch_cache_cleared(self._ask)
        fleet.watch_members(self._follow_members)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._asked.clear()
        self._follow_members()
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    self._changed = trio.Event()
                    for worker in self._waiting - self._asked:
                        self._asked.add(worker)
                        nursery.start_soon(self._ask_until_known, worker)
                    self._waiting &= self._asked
                    await self._changed.wait()
        finally:
            self._asked.clear()

    def _follow_members(self) -> None:
        """A worker may have been switched to "auto"."""
        for worker in self._fleet.workers:
            if not worker.reported_ranks:
                self._ask(worker)

    def _ask(self, worker: Worker) -> None:
        if self._is_wanted(worker):
            self._waiting.add(worker)
            self._changed.set()

    def _is_wanted(self, worker: Worker) -> bool:
        healthy = worker.health.state is Health.HEALTHY
        return worker.ranks == "auto" and healthy and self._fleet.find(worker.url) is worker

    async def _ask_until_known(self, worker: Worker) -> None:
        backoff = Backoff(RETRY_SECS, MAX_RETRY_SECS)
        try:
            while worker in self._waiting and self._is_wanted(worker):
                self._waiting.discard(worker)
                ranks = await _engine_ranks(worker)
                if ranks is None:
                    self._waiting.add(worker)
                    await trio.sleep(backoff.next_delay())
                elif self._fleet.find(worker.url) is worker:
                    if ranks != worker.reported_ranks:
                        _log.info("worker_ranks_reported worker=%s ranks=%d", worker.url, ranks)
                    self._fleet.report_ranks(worker, ranks)
        finally:
            self._asked.discard(worker)
            self._waiting.discard(worker)


async def _engine_ranks(worker: Worker) -> int | None:
    """What the engine says; 1 if it says nothing of ranks, None if it could not be asked."""
    result = await _get(worker, INFO_PATH)
    if result.status in ROUTE_ABSENT:
        result = await _get(worker, OLD_INFO_PATH)
    ranks = ranks_of_info(result) if result.ok else None
    if ranks is not None:
        return ranks
    metrics = await _get(worker, METRICS_PATH)
    if metrics.ok:
        return ranks_of_metrics(metrics.body) or 1
    unknown = {metrics.status, result.status} & {None, *range(500, 600)}
    return None if unknown else 1


async def _get(worker: Worker, path: str) -> CallResult:
    call = Call("GET", path, timeout_secs=TIMEOUT_SECS, max_bytes=MAX_BYTES)
    return await call_worker(worker, call)


def ranks_of_info(result: CallResult) -> int | None:
    """SGLang's `dp_size`, or that of vLLM's configuration; None if there is neither."""
    body = result.json()
    if not isinstance(body, dict):
        return None
    found = body.get("dp_size")
    config = body.get("vllm_config")
    parallel = config.get("parallel_config") if isinstance(config, dict) else None
    if found is None and isinstance(parallel, dict):
        found = parallel.get("data_parallel_size")
    return found if isinstance(found, int) and 1 <= found <= MAX_RANKS else None


def ranks_of_metrics(text: bytes) -> int:
    """vLLM has a series for each engine behind the URL; 0 without any."""
    return min(len(set(_ENGINE_SERIES.findall(text))), MAX_RANKS)
