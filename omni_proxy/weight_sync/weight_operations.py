"""The service for weight operations: the admin API submits calls to it and reads its state.

It decides who runs a call, and runs those that change no weights itself. The order of operations is
that of `operations.operation_queue`; the steps of one are in `operations.runner`, those of a
rollback in `operations.rollback`, of a trainer's sync in `sync.steps`. Invariant: an operation
belongs to this service, not to the request that started it: a client that disconnects cancels
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from uuid import uuid4

import trio

from omni_proxy.admin_ops.admin_route_table import CONTINUE, ROLLBACK, AdminRoute, Kind, variant_of
from omni_proxy.admin_ops.engine_dialects import (
    INIT,
    IS_PAUSED,
    IS_SLEEPING,
    MODEL_INFO,
    TRANSFER_INIT,
    WEIGHT_INFO,
)
from omni_proxy.admin_ops.operation import Operation, Step
from omni_proxy.admin_ops.results import (
    AdminResponse,
    WorkerResult,
    aggregate,
    as_one,
    merge_model_info,
    version_of,
)
from omni_proxy.config.schema import Config
from omni_proxy.fleet.cordon_reasons import CATCHING_UP, PAUSED
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.operations.operation_queue import (
    DetachedCalls,
    OperationHistory,
    OperationQueue,
)
from omni_proxy.weight_sync.operations.rollback import Rollback, RollbackSource
from omni_proxy.weight_sync.operations.runner import OperationRunner
from omni_proxy.weight_sync.operations.version_probe import VersionProbe
from omni_proxy.weight_sync.rollout.service import RolloutCall, RolloutService
from omni_proxy.weight_sync.state_journal import JournalFile, OperationContext, StateJournal
from omni_proxy.weight_sync.sync.endpoint import INITS, SyncEndpoint
from omni_proxy.weight_sync.sync.engine_pauses import abort_all
from omni_proxy.weight_sync.worker_calls import AdminCall, call_all, limit_secs
from omni_proxy.wire.errors import HttpError

RESOLVE = AdminRoute("/weights/resolve", Kind.GROUP)


class WeightOperations:
    """Runs weight operations. Create it before workers are added to the fleet, so that cordons of
    the journal apply before the first request."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore, file: JournalFile) -> None:
        self.journal = StateJournal(fleet, file)
        self.history = OperationHistory()
        self.fleet = fleet
        self._config_store = config_store
        self._context = OperationContext(fleet, config_store, self.journal)
        self.queue = OperationQueue(config_store, self.history.record, self._after_operation)
        self.version_service = VersionService(self._context, file.folder, self.is_updating)
        versions = self.version_service
        self.rollback_source = RollbackSource(versions.store_service, versions.deliverer)
        self.sync = SyncEndpoint(self._context, versions)
        self.sync.lifecycle.on_left = self.probe_again
        self.rollouts = RolloutService(
            self._context, self.queue, self.rollback_source, self._check_no_group
        )
        # Whether another proxy of the cluster may be changing the worker's weights.
        self.is_updated_by_peer: Callable[[Worker], bool] = lambda worker: False
        # Called with URLs of workers whose engines were resumed by a call to this proxy.
        self.on_resumed: Callable[[Sequence[str]], None] = lambda urls: None
        self._deferred: set[str] = set()  # URLs to probe after the current operation
        self._calls = DetachedCalls(self.sync.store_response)
        self._probe = VersionProbe(
            fleet, self.journal, self._is_busy, self._compares_checksums, self._has_sync
        )
        versions.catch_up.on_unavailable = self._probe_instead
        if config_store.config.routing.while_paused == "pass":
            self.journal.cordoned_paused.clear()
        config_store.subscribe(self._on_config_change)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.journal.finish_start()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.version_service.run)
                await self.sync.start(nursery)
                self._calls.nursery = nursery
                self._probe.start(nursery)
                nursery.start_soon(self.journal.follow_restarts)
                nursery.start_soon(self.rollouts.run)
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:  # inside the nursery's block: no task may be started while it closes
                    self._calls.nursery = self._probe.nursery = None
        finally:
            self.sync.stop()

    async def submit(self, call: AdminCall) -> AdminResponse:
        """Run the call and wait for the response. Cancellation ends only the wait, not the call."""
        call = replace(call, route=variant_of(call.route, call.engine_call))
        return await self._calls.run(call.key, lambda: self._perform(call))

    async def start_rollout(self, call: RolloutCall) -> AdminResponse:
        """Start a rollout; the response is a 202. Cancellation ends only the wait."""
        return await self._calls.run(call, lambda: self.rollouts.start(call))

    async def resolve(self, headers: Mapping[str, str], caller: str = "") -> AdminResponse:
        """Resume uncertain workers and return them to rotation."""
        return await self._calls.run(("resolve",), lambda: self._resolve(headers, caller))

    @property
    def waiting(self) -> int:
        """The number of queued operations."""
        return len(self.queue.waiting)

    def is_updating(self, worker: Worker) -> bool:
        """Whether an operation, a sync or another proxy may be changing the worker's weights."""
        lifecycle = self.sync.lifecycle
        in_sync = worker in lifecycle.changing_versions or worker.url in lifecycle.leaving
        return self.queue.targets(worker) or in_sync or self.is_updated_by_peer(worker)

    async def _perform(self, call: AdminCall) -> AdminResponse:
        if not call.route.needs_lock:
            return await self._call_at_once(call)
        self.rollouts.check_conflict(call.route)
        if self.sync.handles(call.route):
            return await self._sync_step(call)
        self.sync.check_conflict(call.route)
        _check_rank_clash(call, self._targets(call))
        operation = self._operation_for(call)

        async def perform() -> AdminResponse:
            workers = self._targets(call)  # again, because the fleet may have changed since
            self.rollouts.check_conflict(call.route)
            self.sync.check_conflict(call.route)
            _check_rank_clash(call, workers)
            return await self._runner(call, operation).run(workers)

        return await self.queue.run(operation, perform)

    def _check_no_group(self, route: AdminRoute) -> None:
        """Raises HttpError 409 if a trainer has a group, since it is about to change weights."""
        self.sync.check_conflict(route)
        if self.journal.in_group:
            message = f"a trainer has a group with the workers: {self.sync.lifecycle.describe()}"
            raise HttpError(409, message, "sync_in_progress", detail=message)

    def _runner(self, call: AdminCall, operation: Operation) -> OperationRunner:
        if call.route is ROLLBACK:
            return Rollback(self._context, call, operation, self.rollback_source)
        return OperationRunner(self._context, call, operation)

    async def _sync_step(self, call: AdminCall) -> AdminResponse:
        """A step of a weight sync, over all participants of the group."""
        if (stored := self.sync.stored_response(call)) is not None:
            return stored
        await self.sync.before_step(call)
        try:
            return await self._queue_sync_step(call)
        finally:
            self.sync.after_step(call)

    async def _queue_sync_step(self, call: AdminCall) -> AdminResponse:
        operation = self._operation_for(call)

        async def perform() -> AdminResponse:
            self.rollouts.check_conflict(call.route)
            lifecycle = self.sync.lifecycle
            candidates = [*lifecycle.workers, *lifecycle.recipients]
            workers = self._targets(call) if call.route.path in INITS else candidates
            operation.targets = tuple(worker.url for worker in workers)
            operation.enter(Step.CALLING, trio.current_time())
            return await self.sync.perform(call, workers)

        return await self.queue.run(operation, perform)

    async def _call_at_once(self, call: AdminCall) -> AdminResponse:
        """Run a call that changes no weights, without the queue.

        A `continue` must not wait for a running update, because that may wait for the `continue`.
        """
        workers, kind = self._targets(call), call.route.kind
        started_at = trio.current_time()
        request = call.to_workers(limit_secs(self._config_store.config.admin.worker_timeout_secs))
        more: dict[str, object] = {}
        if kind is Kind.CONTINUE:
            more = await self.sync.before_continue(call.credentials)
            await self._abort_uncertain(workers, call.credentials)
        results = await call_all(workers, request)
        if kind is Kind.READ:
            return self._read_response(call.route, workers, results)
        succeeded = [w for w, result in zip(workers, results, strict=True) if result.success]
        if kind is Kind.CONTINUE:
            more |= await self._after_continue(succeeded, call.credentials)
        elif kind is Kind.FLUSH:
            for worker in succeeded:
                self.fleet.cache_cleared(worker)
        response = aggregate(call.route.path, results, {})
        if call.route.one_engine:
            response = as_one(call.route.path, response, results)
        response = AdminResponse(response.status, {**response.body, **more})
        operation = self._operation_for(call, requested_at=started_at)
        operation.targets = tuple(worker.url for worker in workers)
        for result in results:
            operation.on_result(result)
        self.history.record(operation, response)
        return response

    def _read_response(
        self, route: AdminRoute, workers: Sequence[Worker], results: Sequence[WorkerResult]
    ) -> AdminResponse:
        if route.path in (MODEL_INFO, WEIGHT_INFO):
            for worker, result in zip(workers, results, strict=True):
                if result.success:
                    self._probe.record_label(worker, version_of(result.body))
            return merge_model_info(results, route.path)
        if route.path == IS_PAUSED:
            results = [self._with_pause(result) for result in results]
        response = aggregate(route.path, results, {})
        return as_one(route.path, response, results) if route.one_engine else response

    async def _after_continue(
        self, resumed: Sequence[Worker], headers: Mapping[str, str]
    ) -> dict[str, object]:
        """Compare deferred checksums and clear the pauses of resumed engines. Returns response
        keys."""
        awake = await self._awake(resumed, headers)
        more = await self.sync.verify_deferred(awake, headers)
        if self.clear_pauses(awake):
            await self.journal.save()
            self.on_resumed([worker.url for worker in awake])
        return more

    async def _abort_uncertain(self, workers: Sequence[Worker], headers: Mapping[str, str]) -> None:
        """Abort requests that paused engines still have: they would continue on unknown weights."""
        journal = self.journal
        paused = [w for w in workers if w.url in journal.uncertain and w.url in journal.all_paused]
        await abort_all(paused, headers)

    def _with_pause(self, result: WorkerResult) -> WorkerResult:
        """For an engine without the route: report a pause if a call to this proxy paused it."""
        if result.status not in ROUTE_ABSENT:
            return result
        report = {"is_paused": result.worker in self.journal.all_paused}
        return replace(result, status=200, body=report)

    async def _awake(self, workers: Sequence[Worker], headers: Mapping[str, str]) -> list[Worker]:
        """Workers that are not asleep: vLLM accepts a resume while it sleeps, but stays asleep."""
        paused = [worker for worker in workers if worker.url in self.journal.all_paused]
        call = Call("GET", IS_SLEEPING, headers=headers)
        results = await call_all(paused, call)
        asleep = {
            result.worker
            for result in results
            if isinstance(result.body, dict) and result.body.get("is_sleeping") is True
        }
        return [worker for worker in workers if worker.url not in asleep]

    async def _resolve(self, headers: Mapping[str, str], caller: str) -> AdminResponse:
        operation = self._new_operation(RESOLVE, caller)

        async def perform() -> AdminResponse:
            urls = list(self.journal.uncertain)
            workers = [self.fleet.find(url) for url in urls]
            alive = [w for w in workers if w and w.health.state is not Health.DEAD]
            operation.targets = tuple(worker.url for worker in alive)
            secs = limit_secs(self._config_store.config.admin.worker_timeout_secs)
            call = AdminCall(CONTINUE, "POST", CONTINUE.path, b"{}", headers)
            results = await call_all(alive, call.to_workers(secs), operation.on_result)
            # A worker without the route cannot have been paused.
            not_resumed = {
                r.worker: r for r in results if not r.success and r.status not in ROUTE_ABSENT
            }
            readable, self.journal.readable = self.journal.readable, True
            resolved = [url for url in urls if url not in not_resumed]
            await self.journal.waive_targets(resolved)
            self.journal.clear_uncertain(resolved)
            self.clear_pauses([worker for worker in alive if worker.url not in not_resumed])
            await self.journal.finish_operation()
            ids = [self._worker_id(url) for url in resolved]
            more = {"journal_readable": readable, "resolved_worker_ids": ids}
            return _resolve_response(more, not_resumed)

        return await self.queue.run(operation, perform)

    def _targets(self, call: AdminCall) -> list[Worker]:
        """Raises HttpError: 503 if no worker is alive, 404 if the selector matches none."""
        alive = self.fleet.live_workers
        if not alive:
            raise HttpError(503, "no live upstream workers", "no_live_worker")
        selected = [w for w in alive if call.chosen is None or w.url in call.chosen]
        if not selected:
            raise HttpError(404, "the selector matches no live worker", "no_workers_match")
        return selected

    def _new_operation(
        self, route: AdminRoute, caller: str, requested_at: float | None = None
    ) -> Operation:
        now = trio.current_time() if requested_at is None else requested_at
        return Operation(uuid4().hex, route, caller, now)

    def _operation_for(self, call: AdminCall, requested_at: float | None = None) -> Operation:
        operation = self._new_operation(call.route, call.caller, requested_at)
        operation.trace_parent = call.headers.get("traceparent", "")
        return operation

    def clear_pauses(self, workers: list[Worker]) -> bool:
        """Record that the engines generate again. Returns whether one of them was paused."""
        resumed = self.journal.forget_pauses(worker.url for worker in workers)
        return self._uncordon_paused(workers) or resumed

    def _uncordon_paused(self, workers: list[Worker]) -> bool:
        """Uncordon paused workers, except on targets of a pause that is running now.

        Returns whether one of them was cordoned.
        """
        current = self.queue.current
        pausing = current if current and current.route.hold == PAUSED else None
        cordoned = [
            worker
            for worker in workers
            if PAUSED in worker.cordon_reasons and not (pausing and worker.url in pausing.targets)
        ]
        for worker in cordoned:
            self.journal.uncordon_paused(worker.url)
        return bool(cordoned)

    def _after_operation(self, operation: Operation) -> None:
        self._probe_unknown(operation.targets)
        deferred, self._deferred = self._deferred, set()
        self.probe_again(deferred)

    def probe_again(self, urls: Iterable[str]) -> None:
        """Probe the workers' versions; those with a running operation after it has ended."""
        for url in urls:
            worker = self.fleet.find(url)
            if worker is None:
                continue
            if self._is_busy(worker):
                self._deferred.add(url)
            else:
                self._probe.probe_soon(worker, returned=True)

    def _probe_instead(self, worker: Worker) -> None:
        """Probe label and digest of a worker that can't catch up: the store lacks the version."""
        if CATCHING_UP not in worker.cordon_reasons:
            return
        if not self.is_updating(worker):  # otherwise the operation sets its version
            self._probe.cordon(worker)  # before uncordoning, so that no request reaches it
        self.fleet.uncordon(worker, CATCHING_UP)
        self.probe_again([worker.url])

    def _probe_unknown(self, urls: tuple[str, ...]) -> None:
        """Probe targets whose version is unknown and that are not marked uncertain."""
        for url in urls:
            worker = self.fleet.find(url)
            if worker and worker.weight_label is None and url not in self.journal.uncertain:
                self._probe.probe_soon(worker)

    def _worker_id(self, url: str) -> str:
        worker = self.fleet.find(url)
        return worker.id if worker else url

    def _is_busy(self, worker: Worker) -> bool:
        """Whether a catch-up or an operation runs that reads the worker's version at its end."""
        return CATCHING_UP in worker.cordon_reasons or self.is_updating(worker)

    def _has_sync(self) -> bool:
        return self._config_store.config.weight_sync.mode != "off"

    def _compares_checksums(self) -> bool:
        return self._config_store.config.weight_sync.verify == "checksum"

    def _on_config_change(self, old: Config, new: Config) -> None:
        passes = new.routing.while_paused == "pass"
        if passes and old.routing.while_paused != new.routing.while_paused:
            self._uncordon_paused(self.fleet.workers)


def _check_rank_clash(call: AdminCall, workers: list[Worker]) -> None:
    """Raises HttpError 422 if several workers would get the same ranks from one body."""
    if call.route.path in (INIT, TRANSFER_INIT) and len(workers) > 1:
        message = (
            "distributed weight-update init currently supports a single-replica target stage, but "
            f"{len(workers)} live workers were targeted; multi-replica refit needs a distinct "
            "rank_offset per replica."
        )
        raise HttpError(422, message, "several_workers", detail=message)


def _resolve_response(
    more: dict[str, object], not_resumed: Mapping[str, WorkerResult]
) -> AdminResponse:
    if not not_resumed:
        return AdminResponse(200, {"status": "ok", "success": True, "message": "ok", **more})
    message = "some workers did not accept continue_generation and stay out of routing"
    unresolved = {url: result.reason for url, result in not_resumed.items()}
    body = {"status": "error", "success": False, "message": message, "unresolved": unresolved}
    return AdminResponse(502, {**body, **more})
