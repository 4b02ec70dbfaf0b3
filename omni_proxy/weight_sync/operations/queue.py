"""The desk where operations on workers are asked for; `run` owns them, not whoever asks.

Invariant: of those that change workers one runs at a time, first come first served, and none while
the configuration changes the fleet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import trio

from omni_proxy.admin_ops import model_info
from omni_proxy.admin_ops.operation import Operation, Step
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, aggregate
from omni_proxy.admin_ops.routes import CONTINUE, INIT, MODEL_INFO, ROLLBACK, AdminRoute, Kind
from omni_proxy.config.schema import Config
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.upstream_http.client import ROUTE_ABSENT
from omni_proxy.weight_sync.delivery.catchup import CATCHING_UP
from omni_proxy.weight_sync.delivery.service import VersionService
from omni_proxy.weight_sync.operations.detached_calls import DetachedCalls, Perform
from omni_proxy.weight_sync.operations.journal_file import JournalFile
from omni_proxy.weight_sync.operations.rollback import Rollback
from omni_proxy.weight_sync.operations.runner import AdminCall, OperationContext, OperationRunner
from omni_proxy.weight_sync.operations.state_journal import PAUSED, StateJournal
from omni_proxy.weight_sync.operations.version_probe import VersionProbe
from omni_proxy.weight_sync.operations.worker_calls import call_all, limit_secs
from omni_proxy.weight_sync.session.endpoint import SyncEndpoint
from omni_proxy.wire.errors import HttpError

HISTORY = 50
RESOLVE = AdminRoute("/weights/resolve", Kind.GROUP)


class WeightOperations:
    """Made before the fleet is filled, so that no worker is routed to that must not be."""

    def __init__(self, fleet: Fleet, config_store: ConfigStore, file: JournalFile) -> None:
        self.book = StateJournal(fleet, file)
        self.history: deque[dict[str, object]] = deque(maxlen=HISTORY)
        self.ended: Counter[tuple[str, bool]] = Counter()  # path, and whether it went well
        self.spent_secs: dict[str, float] = {}  # by path, from being asked to the end
        self._fleet = fleet
        self._config_store = config_store
        self._line: list[Operation] = []
        self._current: Operation | None = None
        self._tools = OperationContext(fleet, config_store, self.book)
        self.holding = VersionService(self._tools, file.folder, self.at_work_on)
        self.sync = SyncEndpoint(fleet, config_store, self.book, self.holding)
        self.sync.life.after = self._look_again
        self._again: set[str] = set()  # URLs that wait for the end of what is under way
        self._tickets = DetachedCalls(self.sync.keep)
        self._labels = VersionProbe(fleet, self.book, self._busy, self._compares, self._is_grouped)
        self.holding.catch_up.leave_open = self._judge_otherwise
        if config_store.config.routing.while_paused == "pass":
            self.book.paused.clear()
        config_store.subscribe(self._follow_config)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.book.settle_start()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.holding.run)
                await self.sync.start(nursery)
                self._tickets.nursery = nursery
                self._labels.start(nursery)
                nursery.start_soon(self.book.follow_restarts)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._tickets.nursery = self._labels.nursery = None
            self.sync.stop()

    async def submit(self, call: AdminCall) -> AdminResponse:
        """Wait for the answer; who is cancelled meanwhile has only left."""
        return await self._tickets.ask(call.key, lambda: self._perform(call))

    async def resolve(self, headers: Mapping[str, str], caller: str = "") -> AdminResponse:
        """Uncertain workers go on where they were paused, and back into routing."""
        return await self._tickets.ask(("resolve",), lambda: self._resolve(headers, caller))

    def status(self) -> dict[str, object]:
        now = trio.current_time()
        return {
            "operation": self._current.status(now) if self._current else None,
            "sync": self.sync.status(),
            "store": self.holding.status(),
            "waiting": [operation.status(now) for operation in self._line],
            "weight_epoch": self.book.published.epoch,
            "weight_version": self.book.published.label,
            "workers": [self._row(worker) for worker in self._fleet.workers],
            "uncertain": dict(self.book.reasons),
            "paused": {url: pause.told() for url, pause in self.book.pauses().items()},
            "journal": {
                "path": self.book.where,
                "readable": self.book.readable,
                "error": self.book.error or None,
            },
            "history": list(self.history),
        }

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._line)

    async def _perform(self, call: AdminCall) -> AdminResponse:
        if not call.route.takes_turn:
            return await self._at_once(call)
        if self.sync.takes(call.route):
            return await self._sync(call)
        self.sync.refuse_beside(call.route)
        _refuse_rank_clash(call, self._targets(call))
        operation = self._operation(call.route, call.caller)

        async def work() -> AdminResponse:
            workers = self._targets(call)  # again: in the meantime some may have come or gone
            self.sync.refuse_beside(call.route)
            _refuse_rank_clash(call, workers)
            return await self._work(call, operation).run(workers)

        return await self._in_turn(operation, work)

    def _work(self, call: AdminCall, operation: Operation) -> OperationRunner:
        if call.route is ROLLBACK:
            return Rollback(self._tools, call, operation, self.holding.source)
        return OperationRunner(self._tools, call, operation)

    async def _sync(self, call: AdminCall) -> AdminResponse:
        """A step of a grouped sync, over all members of the group."""
        if (stored := self.sync.stored(call)) is not None:
            return stored
        await self.sync.before_turn(call)
        try:
            return await self._sync_in_turn(call)
        finally:
            self.sync.has_had_its_turn(call)

    async def _sync_in_turn(self, call: AdminCall) -> AdminResponse:
        operation = self._operation(call.route, call.caller)

        async def work() -> AdminResponse:
            life = self.sync.life
            known = [*life.workers, *life.recipients]
            workers = self._targets(call) if call.route.path == INIT else known
            operation.targets = tuple(worker.url for worker in workers)
            operation.enter(Step.CALLING, trio.current_time())
            return await self.sync.perform(call, workers)

        return await self._in_turn(operation, work)

    async def _at_once(self, call: AdminCall) -> AdminResponse:
        """Routes that change no weights; a second `continue` must never wait for an update."""
        workers = self._targets(call)
        began = trio.current_time()
        request = call.to_workers(limit_secs(self._config_store.config.admin.worker_timeout_secs))
        told: dict[str, object] = {}
        if call.route.kind is Kind.CONTINUE:
            told = await self.sync.before_continue(call.credentials)
        answers = await call_all(workers, request)
        done = [w for w, answer in zip(workers, answers, strict=True) if answer.success]
        if call.route.path == MODEL_INFO:
            for worker, each in zip(workers, answers, strict=True):
                if each.success:
                    self._labels.learn(worker, model_info.version_of(each.body))
            return model_info.merge(answers)
        answer = aggregate(call.route.path, answers, {})
        answer = AdminResponse(answer.status, {**answer.body, **told})
        if call.route.kind is Kind.CONTINUE and self._runs_again(done):
            await self.book.keep()
        elif call.route.kind is Kind.FLUSH:
            for worker in done:
                self._fleet.cache_cleared(worker)
        if call.route.kind is not Kind.READ:
            operation = self._operation(call.route, call.caller, asked_at=began)
            operation.targets = tuple(worker.url for worker in workers)
            for each in answers:
                operation.hear(each)
            self._note(operation, answer)
        return answer

    async def _in_turn(self, operation: Operation, work: Perform) -> AdminResponse:
        """Raises HttpError 503 when the others before it take too long."""
        self._line.append(operation)
        try:
            await self._take_turn()
        finally:
            self._line.remove(operation)
        try:
            self._current = operation
            answer = await work()
            self._note(operation, answer)
            return answer
        finally:
            self._current = None
            self._config_store.operation_lock.release()
            self._ask_of_the_unknown(operation.targets)
            again, self._again = self._again, set()
            self._look_again(again)

    async def _take_turn(self) -> None:
        turn, secs = (
            self._config_store.operation_lock,
            self._config_store.config.admin.lock_timeout_secs,
        )
        try:
            turn.acquire_nowait()
            return
        except trio.WouldBlock:
            pass
        with trio.move_on_after(secs) as scope:
            await turn.acquire()
        if scope.cancelled_caught:
            now = trio.current_time()
            holder = self._current.in_words(now) if self._current else "a change of the fleet"
            message = (
                f"admin update lock not acquired within {secs:g}s; another update operation may be "
                f"in progress: {holder}"
            )
            refusal = HttpError(
                503, message, "update_in_progress", holder=_holder(self._current, now)
            )
            raise refusal.with_headers(("retry-after", "1"))

    async def _resolve(self, headers: Mapping[str, str], caller: str) -> AdminResponse:
        operation = self._operation(RESOLVE, caller)

        async def work() -> AdminResponse:
            urls = list(self.book.reasons)
            found = [self._fleet.find(url) for url in urls]
            alive = [w for w in found if w and w.health.state is not Health.DEAD]
            operation.targets = tuple(worker.url for worker in alive)
            secs = limit_secs(self._config_store.config.admin.worker_timeout_secs)
            call = AdminCall(CONTINUE, "POST", CONTINUE.path, b"{}", headers)
            answers = await call_all(alive, call.to_workers(secs), operation.hear)
            # Who has no such route can't have been paused.
            stuck = {a.worker: a for a in answers if not a.success and a.status not in ROUTE_ABSENT}
            readable, self.book.readable = self.book.readable, True
            resolved = [url for url in urls if url not in stuck]
            await self.book.vouch(resolved)
            self.book.clear(resolved)
            self._runs_again([worker for worker in alive if worker.url not in stuck])
            await self.book.settle()
            ids = [self._id_of(url) for url in resolved]
            told = {"journal_readable": readable, "resolved_worker_ids": ids}
            return _resolved(told, stuck)

        return await self._in_turn(operation, work)

    def _targets(self, call: AdminCall) -> list[Worker]:
        """Raises HttpError: 503 where nobody lives, 404 where nobody is meant."""
        alive = [w for w in self._fleet.workers if w.health.state is not Health.DEAD]
        if not alive:
            raise HttpError(503, "no live upstream workers", "no_live_worker")
        chosen = [w for w in alive if call.chosen is None or w.url in call.chosen]
        if not chosen:
            raise HttpError(404, "the selector matches no live worker", "no_workers_match")
        return chosen

    def _operation(
        self, route: AdminRoute, caller: str, asked_at: float | None = None
    ) -> Operation:
        now = trio.current_time() if asked_at is None else asked_at
        return Operation(uuid4().hex, route, caller, now)

    def _runs_again(self, workers: list[Worker]) -> bool:
        ran = self.book.run_again(worker.url for worker in workers)
        return self._go_on(workers) or ran

    def _go_on(self, workers: list[Worker]) -> bool:
        """They generate again; whom a pause is just being sent to stays as that will leave it.

        Whether one of them was paused.
        """
        pausing = self._current if self._current and self._current.route.hold == PAUSED else None
        back = [
            worker
            for worker in workers
            if PAUSED in worker.cordon_reasons and not (pausing and worker.url in pausing.targets)
        ]
        for worker in back:
            self.book.go_on(worker.url)
        return bool(back)

    def _look_again(self, urls: Iterable[str]) -> None:
        """Whether they have what was published, after a sync that may have changed them."""
        for url in urls:
            worker = self._fleet.find(url)
            if worker is None:
                continue
            if self._busy(worker):
                self._again.add(url)
            else:
                self._labels.ask_soon(worker, came_up=True)

    def _judge_otherwise(self, worker: Worker) -> None:
        """It was to catch up to what nobody can give it: its label and its digest tell."""
        if CATCHING_UP not in worker.cordon_reasons:
            return
        if not self.at_work_on(worker):  # else that settles it
            self._labels.hold(worker)  # no request in between
        self._fleet.uncordon(worker, CATCHING_UP)
        self._look_again([worker.url])

    def _ask_of_the_unknown(self, urls: tuple[str, ...]) -> None:
        """Who gave no plain answer to an update, or none at all, but is not held for it."""
        for url in urls:
            worker = self._fleet.find(url)
            if worker and worker.weight_version is None and url not in self.book.reasons:
                self._labels.ask_soon(worker)

    def _note(self, operation: Operation, answer: AdminResponse) -> None:
        now = trio.current_time()
        path = operation.route.path
        self.ended[path, answer.ok] += 1
        self.spent_secs[path] = self.spent_secs.get(path, 0.0) + now - operation.asked_at
        self.history.append(
            {
                "id": operation.id,
                "path": operation.route.path,
                "caller": operation.caller,
                "ended_at": datetime.now(UTC).isoformat(),
                "secs": round(now - operation.asked_at, 3),
                "http_status": answer.status,
                "success": answer.ok,
                "message": answer.body.get("message"),
                "weight_epoch": answer.body.get("weight_epoch"),
                "workers": operation.progress(),
            }
        )

    def _row(self, worker: Worker) -> dict[str, object]:
        return {
            "worker": worker.url,
            "worker_id": worker.id,
            "weight_version": worker.weight_version,
            "weight_epoch": worker.weight_epoch,
            "routable": worker.routable,
            "held_by": sorted(worker.cordon_reasons),
            "uncertain": self.book.reasons.get(worker.url),
        }

    def _id_of(self, url: str) -> str:
        worker = self._fleet.find(url)
        return worker.id if worker else url

    def _busy(self, worker: Worker) -> bool:
        """Whoever is at it reads its version back itself."""
        return CATCHING_UP in worker.cordon_reasons or self.at_work_on(worker)

    def at_work_on(self, worker: Worker) -> bool:
        """Its weights are being changed, or it is asked to do something that takes long."""
        current = self._current is not None and worker.url in self._current.targets
        life = self.sync.life
        return current or worker in life.doubt or worker.url in life.leaving

    def _is_grouped(self) -> bool:
        return self._config_store.config.weight_sync.mode != "off"

    def _compares(self) -> bool:
        return self._config_store.config.weight_sync.verify == "checksum"

    def _follow_config(self, old: Config, new: Config) -> None:
        passes = new.routing.while_paused == "pass"
        if passes and old.routing.while_paused != new.routing.while_paused:
            self._go_on(self._fleet.workers)


def _refuse_rank_clash(call: AdminCall, workers: list[Worker]) -> None:
    """Raises HttpError 422: the ranks in the one body would be taken by every worker."""
    if call.route.path == INIT and len(workers) > 1:
        message = (
            "distributed weight-update init currently supports a single-replica target stage, but "
            f"{len(workers)} live workers were targeted; multi-replica refit needs a distinct "
            "rank_offset per replica."
        )
        raise HttpError(422, message, "several_workers", detail=message)


def _holder(operation: Operation | None, now: float) -> dict[str, Any] | None:
    return operation.status(now) if operation else None


def _resolved(told: dict[str, object], stuck: Mapping[str, WorkerResult]) -> AdminResponse:
    if not stuck:
        return AdminResponse(200, {"status": "ok", "success": True, "message": "ok", **told})
    message = "some workers did not take continue_generation and stay out of routing"
    unresolved = {url: answer.why for url, answer in stuck.items()}
    body = {"status": "error", "success": False, "message": message, "unresolved": unresolved}
    return AdminResponse(502, {**body, **told})
