"""One operation that has its turn: hold, drain, write down, call, read back, compare, restore.

Invariant: no call leaves before the record of it is on the disk and its targets are held; no target
is let go before its fate is written down. A refusal before the calls leaves everything as it was.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import trio

from omni_proxy.admin_ops.operation import Disposition, Operation, Step, WorkerFate, fates
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, aggregate
from omni_proxy.admin_ops.routes import AdminRoute, Kind
from omni_proxy.config.overlay import SavedState, with_override
from omni_proxy.config.schema import Config
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.worker_drain import wait_idle
from omni_proxy.upstream_http.client import Call
from omni_proxy.weight_sync.operations.state_journal import PAUSED, StateJournal
from omni_proxy.weight_sync.operations.worker_calls import (
    ANSWER_BYTES,
    call_all,
    compare_checksums,
    labels_of,
    limit_secs,
)
from omni_proxy.weight_sync.protocol.checksum_agreement import Verdict
from omni_proxy.weight_sync.protocol.journal import JournalEntry, PauseRecord
from omni_proxy.weight_sync.protocol.published_version import PublishedVersion, TargetVersion
from omni_proxy.wire.errors import HttpError

DIFFERS = Disposition(WorkerFate.UNCERTAIN, "its checksums differ from those of other workers")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdminCall:
    """What somebody asks of the workers. `chosen`: the URLs that are meant, None for all.

    `target` is the path and the query as workers get them; `caller` is how to name who asks.
    """

    route: AdminRoute
    method: str
    target: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    chosen: frozenset[str] | None = None
    caller: str = ""

    def to_workers(self, timeout_secs: float) -> Call:
        return Call(
            self.method,
            self.target,
            self.body,
            self.headers,
            timeout_secs=timeout_secs,
            max_bytes=ANSWER_BYTES,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same thing asked by the same party again."""
        return self.method, self.target, self.body, self.chosen, self.headers.get("authorization")

    @property
    def credentials(self) -> dict[str, str]:
        """What our own questions to the workers carry."""
        key = self.headers.get("authorization")
        return {"authorization": key} if key else {}

    def says(self, name: str) -> object:
        """A key of its body; None where that has none."""
        try:
            body = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError):
            return None
        return body.get(name) if isinstance(body, dict) else None


@dataclass(frozen=True, slots=True)
class OperationContext:
    """What an operation works with."""

    fleet: Fleet
    config_store: ConfigStore
    book: StateJournal


class OperationRunner:
    """`run` once, with the turn in hand."""

    def __init__(self, tools: OperationContext, call: AdminCall, operation: Operation) -> None:
        self._fleet, self._config_store, self._book = tools.fleet, tools.config_store, tools.book
        self._call = call
        self._route = call.route
        self._operation = operation
        self._config: Config = self._config_store.config
        self._before: dict[Worker, WeightVersion] = {}

    async def run(self, workers: Sequence[Worker]) -> AdminResponse:
        """Raises HttpError 503 where it can't be written down; then nothing was sent."""
        self._operation.target({worker.url: frozenset(worker.cordon_reasons) for worker in workers})
        self._hold(workers)
        try:
            await self._fleet.await_replicated()
            await self._drain(workers)
            await self._record()
        except BaseException:
            self._let_go(workers)
            raise
        self._enter(Step.CALLING)
        self._doubt(workers)
        answers = await self._ask(workers)
        left = fates(self._route, answers)
        done = [worker for worker, answer in zip(workers, answers, strict=True) if answer.success]
        told: dict[str, object] = {}
        if self._route.kind is Kind.UPDATE and done:
            told, left = await self._prove(done, left)
        self._enter(Step.RESTORING)
        self._take_back_doubt(answers, left)
        self._note_paused(answers)
        await self._settle(answers, left)
        self._let_go(workers)
        self._enter(Step.OVER)
        return self._answer(answers, left, told)

    async def _ask(self, workers: Sequence[Worker]) -> list[WorkerResult]:
        """What it is all about: each worker's answer, in their order."""
        call = self._call.to_workers(limit_secs(self._config.admin.worker_timeout_secs))
        return await call_all(workers, call, self._operation.hear)

    def _enter(self, step: Step) -> None:
        self._operation.enter(step, trio.current_time())

    def _hold(self, workers: Sequence[Worker]) -> None:
        if self._route.kind is Kind.PAUSE and self._config.routing.while_paused != "pass":
            holds = True
        else:
            holds = self._config.weight_sync.while_updating != "pass"
        for worker in workers if holds else ():
            self._fleet.cordon(worker, self._route.hold)

    async def _drain(self, workers: Sequence[Worker]) -> None:
        """Time for what runs; what is late is left to the caller's choice of abort or retract."""
        secs = self._config.weight_sync.drain_secs
        if not self._route.drains or not secs:
            return
        self._enter(Step.DRAINING)
        running = [worker for worker in workers if worker.url not in self._book.stopped]
        await wait_idle(running, secs, self._route.name)

    async def _record(self) -> None:
        self._enter(Step.RECORDING)
        begun = JournalEntry(
            operation=self._operation.id,
            path=self._route.path,
            targets=self._operation.targets,
            begun_at=datetime.now(UTC).isoformat(),
            step=Step.CALLING.value,
        )
        try:
            await self._book.begin(begun)
        except OSError as error:
            reason = error.strerror or error
            message = f"nothing was sent: the journal {self._book.where} can't be written: {reason}"
            raise HttpError(503, message, "journal_unwritable") from None

    def _doubt(self, workers: Sequence[Worker]) -> None:
        """From the first call until a worker has been heard nobody knows which weights it has."""
        if self._route.kind is Kind.UPDATE:
            self._before = {worker: worker.version for worker in workers}
            for worker in workers:
                self._fleet.set_version(worker, None, 0)

    def _take_back_doubt(
        self, answers: Sequence[WorkerResult], left: Mapping[str, Disposition]
    ) -> None:
        """Who plainly refused, and is certain, has the weights that it had."""
        refused = {
            a.worker for a in answers if a.refused and left[a.worker].fate is WorkerFate.RESTORED
        }
        for worker, version in self._before.items():
            if worker.url in refused:
                self._fleet.set_version(worker, version.label, version.epoch)

    async def _prove(
        self, done: Sequence[Worker], left: Mapping[str, Disposition]
    ) -> tuple[dict[str, object], dict[str, Disposition]]:
        """Read the versions back and compare the replicas; what comes of it."""
        call, left = self._call, dict(left)
        self._enter(Step.READING)
        labels = await labels_of(done, call.credentials)
        verdict = await self._compare(done)
        left |= dict.fromkeys(verdict.mismatched, DIFFERS)
        published = await self._publish(labels, verdict)
        for worker, label in labels.items():
            if left[worker.url] is not DIFFERS:
                self._fleet.set_version(worker, label, published.epoch)
            if call.says("flush_cache") is not False:
                self._fleet.cache_cleared(worker)
        return {
            "weight_epoch": published.epoch,
            "weight_versions": {worker.url: label for worker, label in labels.items()},
            "verification": verdict.told(),
        }, left

    async def _publish(
        self, labels: Mapping[Worker, str | None], verdict: Verdict
    ) -> PublishedVersion:
        told = set(labels.values())
        label = told.pop() if len(told) == 1 else None
        asked_for = (self._call.says("weight_version"), self._call.says("new_version"))
        before = [self._before[worker].label for worker in labels]
        known = all(before) or label in asked_for
        due = TargetVersion(
            label=label,
            named=label is not None and known and label not in before,
            digest=verdict.whole if self._route.whole and not verdict.mismatched else "",
            models=tuple({worker.model for worker in labels}),
        )
        return await self._book.publish(due, self._call.chosen)

    async def _compare(self, done: Sequence[Worker]) -> Verdict:
        """One replica that took a part of its weights has nobody to agree with."""
        if self._config.weight_sync.verify != "checksum" or self._route.labels:
            return Verdict()
        if len(done) < 2 and not self._route.whole:
            return Verdict(unverified={done[0].url: "no other worker was updated with it"})
        self._enter(Step.VERIFYING)
        secs = limit_secs(self._config.admin.worker_timeout_secs)
        return await compare_checksums(done, self._call.credentials, secs)

    async def _settle(
        self, answers: Sequence[WorkerResult], left: Mapping[str, Disposition]
    ) -> None:
        """Everything that keeps a worker out is in force before the record is cleared."""
        for url, what in left.items():
            if what.fate is WorkerFate.DISABLED:
                await self._disable(url, what.reason)
        uncertain = {
            u: what.reason for u, what in left.items() if what.fate is WorkerFate.UNCERTAIN
        }
        self._book.mark(uncertain)
        if self._route.whole:
            whole = (answer.worker for answer in answers if answer.success)
            self._book.clear(url for url in whole if url not in uncertain)
        await self._book.settle()

    async def _disable(self, url: str, reason: str) -> None:
        def edit(state: SavedState, _: Config) -> SavedState:
            return with_override(state, url, disabled=True)

        await self._config_store.change(edit, at_once=True)
        _log.warning("Worker %s is disabled until somebody enables it: %s", url, reason)

    def _note_paused(self, answers: Sequence[WorkerResult]) -> None:
        if self._route.kind is not Kind.PAUSE and self._call.says("keep_pause") is not True:
            return
        for answer in answers:
            if answer.success:
                self._book.stand_still(answer.worker, self._pause_of(answer.worker))
                if self._stays_held():
                    self._book.pause(answer.worker)

    def _pause_of(self, url: str) -> PauseRecord:
        worker, mode = self._fleet.find(url), self._call.says("mode")
        return PauseRecord(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            by=self._call.caller,
            path=self._route.path,
            mode=mode if isinstance(mode, str) else "",
            instance=worker.instance if worker is not None else "",
        )

    def _let_go(self, workers: Sequence[Worker]) -> None:
        """Each back to the holds that it had, and "paused" beside where it is and should stay."""
        for worker in workers:
            was = self._operation.was[worker.url]
            if self._route.hold not in was and not self._still_paused(worker):
                self._fleet.uncordon(worker, self._route.hold)

    def _still_paused(self, worker: Worker) -> bool:
        return self._route.hold == PAUSED and worker.url in self._book.paused

    def _stays_held(self) -> bool:
        """While a trainer's group is there, a pause is a part of its sync."""
        config = self._config_store.config
        updating = config.weight_sync.while_updating
        # Without a queue of ours they would only be refused: the workers have one.
        waits = updating == "shed" or (updating == "hold" and config.server.queue_size > 0)
        return config.routing.while_paused != "pass" or (self._book.in_group and waits)

    def _answer(
        self,
        answers: Sequence[WorkerResult],
        left: Mapping[str, Disposition],
        told: Mapping[str, object],
    ) -> AdminResponse:
        more: dict[str, dict[str, object]] = {}
        for url, what in left.items():
            reason = {"reason": what.reason} if what.reason else {}
            more[url] = {"standing": what.fate.value, **reason}
        answer = aggregate(self._route.path, answers, more)
        body = {**answer.body, **told}
        if self._book.error:
            body["journal_error"] = self._book.error
        if answer.ok and any(what is DIFFERS for what in left.values()):
            message = "the workers took the update, but their checksums differ"
            return AdminResponse(
                502, {**body, "success": False, "status": "error", "message": message}
            )
        return replace(answer, body=body)
