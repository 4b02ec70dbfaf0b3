"""Starts, pauses, resumes and cancels rollouts for POST /weights/rollout and its sub-routes.

Invariants: one rollout at a time; it is accepted only after every worker has reported its version,
and a refused one changes nothing. Until it ends, no other operation changes weights or pauses
engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

import trio

from omni_proxy.admin_ops.admin_route_table import ROLLOUT, AdminRoute
from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.delivery.worker_update import BY_RPC, CannotUpdate, WorkerUpdater
from omni_proxy.weight_sync.operations.operation_queue import OperationQueue
from omni_proxy.weight_sync.operations.rollback import RollbackSource, unknown_version
from omni_proxy.weight_sync.protocol import rollout_state_machine as transitions
from omni_proxy.weight_sync.protocol.rollout_state_machine import (
    FormerVersion,
    InvalidStep,
    RolloutState,
    RolloutWorker,
    WorkerPhase,
)
from omni_proxy.weight_sync.rollout.batch import RolloutContext
from omni_proxy.weight_sync.rollout.driver import FleetView, RolloutDriver
from omni_proxy.weight_sync.rollout.progress import RolloutProgress, now_text
from omni_proxy.weight_sync.rollout.request import RolloutRequest, invalid
from omni_proxy.weight_sync.state_journal import OperationContext
from omni_proxy.weight_sync.store.manifest import StoredVersion
from omni_proxy.weight_sync.store.version_store import UnknownVersion
from omni_proxy.wire.errors import HttpError


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """A request for a rollout. `chosen`: URLs of its workers, None for all; `caller`: its name."""

    request: RolloutRequest
    chosen: frozenset[str] | None = None
    caller: str = ""
    credentials: Mapping[str, str] | None = None


class RolloutService:
    """Controls rollouts. `check_free(route)` raises HttpError while a sync changes weights."""

    def __init__(
        self,
        context: OperationContext,
        queue: OperationQueue,
        source: RollbackSource,
        check_free: Callable[[AdminRoute], None],
    ) -> None:
        self.progress = RolloutProgress(context.journal)
        self._fleet, self._config_store = context.fleet, context.config_store
        self._journal, self._queue = context.journal, queue
        self._source, self._check_free = source, check_free
        updater = WorkerUpdater(source.deliverer)
        self._context = RolloutContext(
            context, self.progress, updater, lambda number: self._view.find_stored(number)
        )
        self._view = FleetView(self._context, source.store_service)
        self._driver = RolloutDriver(self._context, queue, self._view, source.store_service)

    async def run(self) -> None:
        await self._driver.run()

    def status(self) -> dict[str, object] | None:
        return self.progress.to_dict()

    def check_conflict(self, route: AdminRoute) -> None:
        """Raises HttpError 409 for an operation that conflicts with a running rollout."""
        state = self.progress.active
        if state is not None and route.needs_lock:
            message = (
                f"{state.name} is {state.phase}: updates and pauses are refused until it has "
                "ended; POST /weights/rollout/cancel ends it and restores the former weights"
            )
            status = self.status()
            raise HttpError(409, message, "rollout_in_progress", detail=message, rollout=status)

    async def start(self, call: RolloutCall) -> AdminResponse:
        """Plan and begin a rollout. Raises HttpError 400, 404, 409, 422, 503, changing nothing."""
        self.check_conflict(ROLLOUT)
        self._check_free(ROLLOUT)
        operation = Operation(uuid4().hex, ROLLOUT, call.caller, trio.current_time())

        async def perform() -> AdminResponse:
            self.check_conflict(ROLLOUT)
            self._check_free(ROLLOUT)
            self._context.credentials = call.credentials or {}
            state = await self._plan(call)
            try:
                await self.progress.begin(state)
            except OSError as error:
                path, reason = self._journal.path, error.strerror or error
                message = f"nothing was begun: the journal {path} can't be written: {reason}"
                raise HttpError(503, message, "journal_unwritable", detail=message) from None
            return self._response(f"{state.name} has begun", 202)

        return await self._queue.run(operation, perform)

    async def pause(self) -> AdminResponse:
        """Pause after the current batch. Raises HttpError 409."""
        return await self._steer(transitions.pause, "it is paused after the current batch")

    async def resume(self) -> AdminResponse:
        """Raises HttpError 409."""
        return await self._steer(transitions.resume, "it continues")

    async def cancel(self, caller: str) -> AdminResponse:
        """Raises HttpError 409."""
        effect = "it ends, and updated workers roll back"
        return await self._steer(lambda state: transitions.cancel(state, caller), effect)

    async def _steer(
        self, step: Callable[[RolloutState], RolloutState], message: str
    ) -> AdminResponse:
        state = self.progress.active
        if state is None:
            none = "no rollout is running"
            raise HttpError(409, none, "no_rollout", detail=none)
        try:
            if self.progress.ending:
                raise InvalidStep("the rollout is ending")
            self.progress.put(step(state))
        except InvalidStep as error:
            raise HttpError(409, str(error), "rollout_out_of_place", detail=str(error)) from None
        await self.progress.save()
        return self._response(message)

    def _response(self, message: str, status: int = 200) -> AdminResponse:
        top = {"success": True, "message": message, "status": "ok"}
        return AdminResponse(status, {**top, "rollout": self.status()})

    # Planning

    async def _plan(self, call: RolloutCall) -> RolloutState:
        """Validate the call and plan the rollout, without changing a worker."""
        request = call.request
        version = await self._stored(request)
        label = request.weight_version or ((version.label or "") if version is not None else "")
        if not label:
            raise invalid("the stored version has no label: set one with weight_version")
        workers = self._targets(call.chosen)
        rows = await self._describe(workers, version)
        self._require_new_label(label, rows)
        serving = [row for row in rows if row.phase is not WorkerPhase.SKIPPED]
        config, published = self._config_store.config, self._journal.published
        drain = config.weight_sync.drain_secs or config.server.drain_timeout_secs
        return RolloutState(
            id=uuid4().hex,
            label=label,
            model=workers[0].model,
            path=request.model_path,
            number=version.number if version is not None else 0,
            load_format=request.load_format,
            caller=call.caller,
            begun_at=now_text(),
            max_unavailable=request.max_unavailable.of(len(serving)),
            canary=min(request.canary, len(serving)),
            pause_after_canary=request.pause_after_canary,
            drain_secs=drain if request.drain_secs is None else request.drain_secs,
            open_ended=call.chosen is None,
            epoch_before=published.epoch,
            label_before=published.label,
            workers=tuple(rows),
        )

    async def _stored(self, request: RolloutRequest) -> StoredVersion | None:
        if request.version is None:
            return None
        store = await self._source.open_store()
        try:
            return store.find(request.version)
        except UnknownVersion as error:
            raise unknown_version(str(error), store) from None

    def _targets(self, selected: frozenset[str] | None) -> list[Worker]:
        alive = self._fleet.live_workers
        if not alive:
            raise HttpError(503, "no live upstream workers", "no_live_worker")
        workers = [worker for worker in alive if selected is None or worker.url in selected]
        if not workers:
            raise HttpError(404, "the selector matches no live worker", "no_workers_match")
        if not any(worker.health.state is Health.HEALTHY for worker in workers):
            message = "none of the workers is healthy: a rollout needs one that can be updated"
            raise HttpError(503, message, "no_healthy_worker", detail=message)
        models = sorted({worker.model or "(no model)" for worker in workers})
        if len(models) > 1:
            raise invalid(
                f"the workers serve several models: {', '.join(models)}. Name one with "
                "?selector=model=NAME"
            )
        paused = [worker.url for worker in workers if worker.url in self._journal.all_paused]
        if paused:
            message = (
                f"paused: {', '.join(paused)}. A rollout keeps the fleet serving: end the pause "
                "with POST /continue_generation first"
            )
            raise HttpError(409, message, "workers_paused", detail=message, workers=paused)
        return spread_roles(workers)

    async def _describe(
        self, workers: Sequence[Worker], version: StoredVersion | None
    ) -> list[RolloutWorker]:
        """Describe workers, in their order; one that is not healthy is skipped for now."""
        rows: dict[str, RolloutWorker] = {}
        refusals: dict[str, str] = {}

        async def describe(worker: Worker) -> None:
            try:
                row = await self._view.describe(worker)
                if version is not None and row.dialect == BY_RPC:
                    raise CannotUpdate("a vLLM server loads a model_path, not a stored version")
                rows[worker.url] = row
            except CannotUpdate as error:
                refusals[worker.url] = str(error)

        async with trio.open_nursery() as nursery:
            for worker in workers:
                if worker.health.state is Health.HEALTHY:
                    nursery.start_soon(describe, worker)
                else:
                    reason = f"it is {worker.health.state}; it is updated once it is healthy"
                    rows[worker.url] = RolloutWorker(
                        url=worker.url, phase=WorkerPhase.SKIPPED, reason=reason
                    )
        if refusals:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in refusals.items())
            message = f"nothing was changed, because these can't be updated: {reasons}"
            raise HttpError(422, message, "not_updatable", detail=message, workers=refusals)
        return [rows[worker.url] for worker in workers]

    def _require_new_label(self, label: str, rows: Sequence[RolloutWorker]) -> None:
        formers: list[tuple[str, FormerVersion]] = [
            (row.url, row.former) for row in rows if row.former is not None
        ]
        holders = [url for url, former in formers if former.label == label]
        if holders:
            message = (
                f"weight_version {label!r} is already reported by {', '.join(holders)}: choose "
                "another label for the new weights"
            )
            raise HttpError(409, message, "label_in_use", detail=message, workers=holders)


def spread_roles(workers: Sequence[Worker]) -> list[Worker]:
    """Order workers so that every section of the list has each role in proportion.

    Only workers with the same weights form pairs: if all prefill workers were updated first, no
    decode worker would have a partner until its own update.
    """
    counts = Counter(worker.role for worker in workers)
    places: Counter[str] = Counter()
    shares = []
    for worker in workers:
        shares.append(((places[worker.role] + 0.5) / counts[worker.role], worker))
        places[worker.role] += 1
    return [worker for _, worker in sorted(shares, key=lambda share: share[0])]
