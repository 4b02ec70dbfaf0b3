"""POST /abort_request (SGLang) and /abort_requests (vLLM): aborts over the whole fleet.

Contract: nothing is queued, no lock is taken, and no worker state except `dead` prevents a call: an
abort must work during an update or a pause. If the worker of a request is known, only that worker
is called, otherwise all are. An engine that lacks the caller's route is called in the other
dialect; which one it has follows from its reply to the first call.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final

import trio
from quart import Quart, Response

from omni_proxy.admin_api.access.key_check import caller
from omni_proxy.admin_api.forwarded_request import target_of, worker_headers
from omni_proxy.admin_api.responses import body_bytes, json_response
from omni_proxy.admin_api.services import DataPlaneView
from omni_proxy.admin_ops.abort_requests import (
    AbortDialect,
    AbortFindings,
    AbortTarget,
    abort_response,
    call_bodies,
    read_target,
    urls_to_call,
)
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.upstream_http.client import MAX_PARALLEL_CALLS, ROUTE_ABSENT, Call, call_each
from omni_proxy.weight_sync.worker_calls import limit_secs, request_worker

_log = logging.getLogger(__name__)

ABORT_SECS: Final = 30.0  # the loop of a busy engine may take seconds to answer


class _Abort:
    """One abort request. `dialect`: the caller's; `secs`: time limit of each call."""

    def __init__(self, dialect: AbortDialect, body: bytes, secs: float) -> None:
        self.dialect = dialect
        self.body = body
        self.secs = secs
        self.target: AbortTarget = read_target(dialect, body)
        self.request_target = target_of(dialect.value)
        self.headers = worker_headers(body)
        self.findings = AbortFindings()

    def calls(self, dialect: AbortDialect, worker: Worker) -> list[Call]:
        """The calls to `worker` in this dialect. The caller's own is passed on unchanged."""
        if dialect is self.dialect:
            targets, bodies = self.request_target, [self.body]
        else:
            running = self.findings.running.get(worker.url, ())
            targets, bodies = dialect.value, call_bodies(dialect, self.target, running)
        return [
            Call("POST", targets, body, self.headers, timeout_secs=self.secs) for body in bodies
        ]


class FleetAbortRoutes:
    """`_dialects`: the dialect of workers that lack the caller's route, by URL."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore, data_plane: DataPlaneView) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._data_plane = data_plane
        self._dialects: dict[str, AbortDialect] = {}

    def mount(self, app: Quart) -> None:
        app.add_url_rule(
            AbortDialect.SGLANG.value, "abort_request", self.abort_request, methods=["POST"]
        )
        app.add_url_rule(
            AbortDialect.VLLM.value, "abort_requests", self.abort_requests, methods=["POST"]
        )

    async def abort_request(self) -> Response:
        return await self._abort(AbortDialect.SGLANG)

    async def abort_requests(self) -> Response:
        return await self._abort(AbortDialect.VLLM)

    async def _abort(self, dialect: AbortDialect) -> Response:
        """Raises HttpError 400."""
        configured = limit_secs(self._config_store.config.admin.worker_timeout_secs)
        abort = _Abort(dialect, await body_bytes(), min(ABORT_SECS, configured))
        abort.findings = await self._data_plane.abort(abort.target)
        workers = self._to_call(urls_to_call(abort.target, abort.findings))
        results = await self._call_workers(workers, abort)
        sent_ids = len(abort.target.ids)
        response = abort_response(dialect, results, sent_ids, abort.findings.waiting)
        _log.info(
            "requests_aborted path=%s by=%s workers=%d ended_in_queue=%d status=%d",
            dialect.value, caller(), len(workers), abort.findings.waiting, response.status,
        )  # fmt: skip
        return json_response(response.body, response.status)

    def _to_call(self, urls: Collection[str] | None) -> list[Worker]:
        """All workers that are not dead, or those at `urls`, dead or not: a failure to reach one of
        these must show in the response."""
        workers = self._fleet.workers
        self._dialects = {w.url: self._dialects[w.url] for w in workers if w.url in self._dialects}
        if urls is not None:
            return [worker for worker in workers if worker.url in urls]
        return [worker for worker in workers if worker.health.state is not Health.DEAD]

    async def _call_workers(self, workers: Sequence[Worker], abort: _Abort) -> list[WorkerResult]:
        """Call all workers concurrently; the results are in the order of the workers."""
        limiter = trio.CapacityLimiter(MAX_PARALLEL_CALLS)
        return await call_each(workers, lambda worker: self._call_worker(worker, abort, limiter))

    async def _call_worker(
        self, worker: Worker, abort: _Abort, limiter: trio.CapacityLimiter
    ) -> WorkerResult:
        dialect = self._dialects.get(worker.url, abort.dialect)
        first = await _call_all(worker, abort.calls(dialect, worker), limiter)
        if first.status not in ROUTE_ABSENT:
            return first
        second = await _call_all(worker, abort.calls(dialect.other, worker), limiter)
        if second.status in ROUTE_ABSENT:
            return first
        self._dialects[worker.url] = dialect.other
        return second


async def _call_all(
    worker: Worker, calls: Sequence[Call], limiter: trio.CapacityLimiter
) -> WorkerResult:
    """The result of the first call that failed, else of the last one."""

    async def call_one(call: Call) -> WorkerResult:
        async with limiter:
            return await request_worker(worker, call)

    results = await call_each(calls, call_one)
    return next((result for result in results if not result.success), results[-1])
