"""Runs one weight operation: cordon, drain, record, call, read labels, compare, restore.

Invariant: no call is sent before its record is on disk and its targets are cordoned; no target is
uncordoned before its outcome is recorded. An operation refused before its calls changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import trio

from omni_proxy.admin_ops.admin_route_table import Kind
from omni_proxy.admin_ops.engine_dialects import PAUSE, SLEEP
from omni_proxy.admin_ops.operation import (
    Disposition,
    Operation,
    Step,
    WorkerOutcome,
    worker_dispositions,
)
from omni_proxy.admin_ops.results import AdminResponse, WorkerResult, aggregate, as_one
from omni_proxy.config.overlay import SavedState, with_override
from omni_proxy.config.schema import Config
from omni_proxy.fleet.cordon_reasons import PAUSED
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.worker_drain import drain_cordoned
from omni_proxy.weight_sync.protocol.checksum_agreement import Verdict
from omni_proxy.weight_sync.protocol.journal import JournalEntry, PauseRecord
from omni_proxy.weight_sync.protocol.published_version import PublishedVersion, TargetVersion
from omni_proxy.weight_sync.state_journal import OperationContext
from omni_proxy.weight_sync.worker_calls import (
    AdminCall,
    call_all,
    limit_secs,
    read_labels,
    verify_checksums,
)
from omni_proxy.wire.errors import HttpError

MISMATCHED = Disposition(
    WorkerOutcome.UNCERTAIN, "its checksums differ from those of other workers"
)
_log = logging.getLogger(__name__)


class OperationRunner:
    """Runs one operation: call `run` once, while the operation lock is held."""

    def __init__(self, context: OperationContext, call: AdminCall, operation: Operation) -> None:
        self._fleet = context.fleet
        self._config_store = context.config_store
        self._journal = context.journal
        self._call = call
        self._route = call.route
        self._operation = operation
        self._config: Config = self._config_store.config
        self._before: dict[Worker, WeightVersion] = {}

    async def run(self, workers: Sequence[Worker]) -> AdminResponse:
        """Raises HttpError 503, before any call, if the journal cannot be written."""
        self._operation.target({worker.url: frozenset(worker.cordon_reasons) for worker in workers})
        self._cordon(workers)
        try:
            await self._fleet.await_held()
            await self._drain(workers)
            await self._record()
        except BaseException:
            self._uncordon(workers)
            raise
        self._enter(Step.CALLING)
        self._clear_versions(workers)
        results = await self._call_workers(workers)
        dispositions = worker_dispositions(self._route, results)
        succeeded = [w for w, result in zip(workers, results, strict=True) if result.success]
        more: dict[str, object] = {}
        if self._route.kind is Kind.UPDATE and succeeded and not self._route.discards:
            more, dispositions = await self._verify(succeeded, dispositions)
        self._enter(Step.RESTORING)
        self._restore_versions(results, dispositions)
        self._record_pauses(results)
        await self._apply_dispositions(results, dispositions)
        self._uncordon(workers)
        self._enter(Step.OVER)
        return self._response(results, dispositions, more)

    async def _call_workers(self, workers: Sequence[Worker]) -> list[WorkerResult]:
        """Send the call to all workers. Results are in the order of the workers."""
        call = self._call.to_workers(limit_secs(self._config.admin.worker_timeout_secs))
        return await call_all(workers, call, self._operation.on_result)

    def _enter(self, step: Step) -> None:
        self._operation.enter(step, trio.current_time())

    def _cordon(self, workers: Sequence[Worker]) -> None:
        if self._route.kind is Kind.PAUSE and self._config.routing.while_paused != "pass":
            cordons = True
        else:
            cordons = self._config.weight_sync.while_updating != "pass"
        for worker in workers if cordons else ():
            self._fleet.cordon(worker, self._route.hold)

    async def _drain(self, workers: Sequence[Worker]) -> None:
        """Wait for requests in flight.

        After that the engine aborts or retracts the remaining ones, as the call's mode requests.
        """
        secs = self._config.weight_sync.drain_secs
        if self._route.kind is Kind.PAUSE and self._call.argument("mode") == "wait":
            secs = limit_secs(self._config.admin.worker_timeout_secs)
        if not self._route.drains or not secs:
            return
        self._enter(Step.DRAINING)
        running = [worker for worker in workers if worker.url not in self._journal.paused_engines]
        await drain_cordoned(running, secs, self._route.name)

    async def _record(self) -> None:
        self._enter(Step.RECORDING)
        entry = JournalEntry(
            operation=self._operation.id,
            path=self._route.path,
            targets=self._operation.targets,
            begun_at=datetime.now(UTC).isoformat(),
            step=Step.CALLING.value,
        )
        try:
            await self._journal.begin_operation(entry)
        except OSError as error:
            reason = error.strerror or error
            path = self._journal.path
            message = f"nothing was sent: the journal {path} can't be written: {reason}"
            raise HttpError(503, message, "journal_unwritable") from None

    def _clear_versions(self, workers: Sequence[Worker]) -> None:
        """Mark the weights of the workers as unknown until the results of the calls are in."""
        if self._route.kind is Kind.UPDATE or self._route.discards:
            self._before = {worker: worker.weight_version for worker in workers}
            for worker in workers:
                self._fleet.set_version(worker, None, 0)

    def _restore_versions(
        self, results: Sequence[WorkerResult], dispositions: Mapping[str, Disposition]
    ) -> None:
        """Restore the version of each worker that refused the call and is not uncertain."""
        refused = {
            result.worker
            for result in results
            if result.refused and dispositions[result.worker].outcome is WorkerOutcome.RESTORED
        }
        for worker, version in self._before.items():
            if worker.url in refused:
                self._fleet.set_version(worker, version.label, version.epoch)

    async def _verify(
        self, succeeded: Sequence[Worker], dispositions: Mapping[str, Disposition]
    ) -> tuple[dict[str, object], dict[str, Disposition]]:
        """Read the labels, compare checksums, publish. Returns response keys and dispositions."""
        call, dispositions = self._call, dict(dispositions)
        self._enter(Step.READING)
        labels = await read_labels(succeeded, call.credentials)
        verdict = await self._compare(succeeded)
        dispositions |= dict.fromkeys(verdict.mismatched, MISMATCHED)
        published = await self._publish(labels, verdict)
        for worker, label in labels.items():
            if dispositions[worker.url] is not MISMATCHED:
                self._fleet.set_version(worker, label, published.epoch)
            if call.body_field("flush_cache") is not False:
                self._fleet.cache_cleared(worker)
        return {
            "weight_epoch": published.epoch,
            "weight_versions": {worker.url: label for worker, label in labels.items()},
            "verification": verdict.to_dict(),
        }, dispositions

    async def _publish(
        self, labels: Mapping[Worker, str | None], verdict: Verdict
    ) -> PublishedVersion:
        distinct = set(labels.values())
        label = distinct.pop() if len(distinct) == 1 else None
        requested = (self._call.body_field("weight_version"), self._call.body_field("new_version"))
        before = [self._before[worker].label for worker in labels]
        comparable = all(before) or label in requested
        target = TargetVersion(
            label=label,
            is_new_label=label is not None and comparable and label not in before,
            digest=verdict.whole if self._route.whole and not verdict.mismatched else "",
            models=tuple({worker.model for worker in labels}),
        )
        return await self._journal.publish(target, self._call.chosen)

    async def _compare(self, succeeded: Sequence[Worker]) -> Verdict:
        """Compare checksums; a single worker that got partial weights has none to compare with."""
        if self._config.weight_sync.verify != "checksum" or self._route.labels:
            return Verdict()
        if len(succeeded) < 2 and not self._route.whole:
            return Verdict(unverified={succeeded[0].url: "no other worker was updated with it"})
        self._enter(Step.VERIFYING)
        secs = limit_secs(self._config.admin.worker_timeout_secs)
        return await verify_checksums(succeeded, self._call.credentials, secs)

    async def _apply_dispositions(
        self, results: Sequence[WorkerResult], dispositions: Mapping[str, Disposition]
    ) -> None:
        """Disable workers and mark them uncertain before the journal's record is cleared."""
        for url, disposition in dispositions.items():
            if disposition.outcome is WorkerOutcome.DISABLED:
                await self._disable(url, disposition.reason)
        uncertain = {
            url: disposition.reason
            for url, disposition in dispositions.items()
            if disposition.outcome is WorkerOutcome.UNCERTAIN
        }
        self._journal.mark_uncertain(uncertain)
        if self._route.whole:
            updated = (result.worker for result in results if result.success)
            self._journal.clear_uncertain(url for url in updated if url not in uncertain)
        await self._journal.finish_operation()

    async def _disable(self, url: str, reason: str) -> None:
        def edit(state: SavedState, _: Config) -> SavedState:
            return with_override(state, url, disabled=True)

        await self._config_store.change(edit, at_once=True)
        _log.warning("worker_disabled worker=%s reason=%s", url, reason)

    def _record_pauses(self, results: Sequence[WorkerResult]) -> None:
        keeps_pause = self._call.body_field("keep_pause") is True
        if self._route.kind is not Kind.PAUSE and not keeps_pause:
            return
        for result in results:
            if result.success:
                self._forget_cache(result)
                self._journal.record_pause(result.worker, self._pause_record(result.worker))
                if self._cordons_while_paused():
                    self._journal.cordon_paused(result.worker)

    def _forget_cache(self, result: WorkerResult) -> None:
        """Record that vLLM cleared its caches: it does if a pause aborts requests
        (note:real-engines 4)."""
        worker, path = self._fleet.find(result.worker), result.sent_to or self._route.path
        keeps = self._call.argument("mode") in ("keep", "in_place", "retract")
        if worker is not None and path in (PAUSE, SLEEP) and not keeps:
            self._fleet.cache_cleared(worker)

    def _pause_record(self, url: str) -> PauseRecord:
        worker, mode = self._fleet.find(url), self._call.argument("mode")
        return PauseRecord(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            by=self._call.caller,
            path=self._route.path,
            mode=mode if isinstance(mode, str) else "",
            instance=worker.instance if worker is not None else "",
        )

    def _uncordon(self, workers: Sequence[Worker]) -> None:
        """Remove the cordon reason that the operation added, except from workers that stay
        paused."""
        for worker in workers:
            reasons_before = self._operation.was[worker.url]
            if self._route.hold not in reasons_before and not self._stays_paused(worker):
                self._fleet.uncordon(worker, self._route.hold)

    def _stays_paused(self, worker: Worker) -> bool:
        return self._route.hold == PAUSED and worker.url in self._journal.cordoned_paused

    def _cordons_while_paused(self) -> bool:
        """Whether a paused worker stays cordoned; with a trainer's group, as for an update."""
        config = self._config_store.config
        updating = config.weight_sync.while_updating
        # Without an admission queue, requests to cordoned workers would be refused, while the
        # workers themselves can queue them.
        waits = updating == "shed" or (updating == "hold" and config.server.queue_size > 0)
        return config.routing.while_paused != "pass" or (self._journal.in_group and waits)

    def _response(
        self,
        results: Sequence[WorkerResult],
        dispositions: Mapping[str, Disposition],
        more: Mapping[str, object],
    ) -> AdminResponse:
        rows: dict[str, dict[str, object]] = {}
        for url, disposition in dispositions.items():
            reason = {"reason": disposition.reason} if disposition.reason else {}
            rows[url] = {"standing": disposition.outcome.value, **reason}
        response = aggregate(self._route.path, results, rows)
        if self._route.one_engine:
            response = as_one(self._route.path, response, results)
        body = {**response.body, **more}
        if self._journal.error:
            body["journal_error"] = self._journal.error
        if response.ok and any(disposition is MISMATCHED for disposition in dispositions.values()):
            message = "the workers took the update, but their checksums differ"
            return AdminResponse(
                502, {**body, "success": False, "status": "error", "message": message}
            )
        return replace(response, body=body)
