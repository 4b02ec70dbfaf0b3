"""Pauses of engines by the proxy itself, for updates of engines that no caller has paused.

vLLM's engines have no complete weights between the start and the finish of an update, and a request
then crashes them (run with 0.32.0). So an engine that is not paused is paused before the start, and
resumed after the end. Invariant: such a pause is in the journal before the engine is called, so it
is ended also after a crash of the proxy; a caller's pause is never ended here. Requests on workers
with uncertain weights are aborted before the resume. Which requests wait meanwhile is decided in
`dataplane.admission.update_gate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from omni_proxy.admin_ops.engine_dialects import ABORT_REQUESTS, RESUME, START_UPDATE
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import JSON_TYPE, Call
from omni_proxy.weight_sync.protocol.journal import PauseRecord
from omni_proxy.weight_sync.state_journal import StateJournal
from omni_proxy.weight_sync.worker_calls import REFUSED, call_all

BY: Final = "the proxy"
CALL_SECS: Final = 10.0
# Running requests keep their tokens; the engine recomputes their KV cache with the new weights.
FLUSH: Final = "/reset_prefix_cache?reset_running_requests=true"


class OwnPauses:
    def __init__(self, fleet: Fleet, journal: StateJournal) -> None:
        self._fleet = fleet
        self._journal = journal

    async def begin(self, workers: Sequence[Worker], headers: Mapping[str, str]) -> None:
        """Pause the workers that no caller has paused; the engines keep their running requests.

        A refusal is ignored: the engine reports its error in the start call that follows.
        """
        paused = self._journal.all_paused
        running = [worker for worker in workers if worker.url not in paused]
        for worker in running:
            self._journal.record_pause(
                worker.url,
                PauseRecord(
                    at=datetime.now(UTC).isoformat(timespec="seconds"),
                    by=BY,
                    path=START_UPDATE,
                    mode="keep",
                    instance=worker.instance,
                ),
            )
        if running:
            await self._journal.save()
            await self._call_engines(running, "/pause?mode=keep", headers)

    async def flush(self, workers: Iterable[Worker], headers: Mapping[str, str]) -> list[Worker]:
        """Flush the prefix caches of engines that the proxy paused. Returns these workers."""
        paused = self._paused_here(workers)
        await self._call_engines(paused, FLUSH, headers)
        return paused

    async def end(self, workers: Iterable[Worker], headers: Mapping[str, str]) -> None:
        """Resume the engines that the proxy paused."""
        paused = self._paused_here(workers)
        if not paused:
            return
        await abort_all([w for w in paused if w.url in self._journal.uncertain], headers)
        results = await self._call_engines(paused, RESUME, headers)
        # An engine that did not answer is called again after the next update.
        ended = [r.worker for r in results if r.status is not None or r.error == REFUSED]
        self._journal.forget_pauses(ended)
        await self._journal.save()

    def _paused_here(self, workers: Iterable[Worker]) -> list[Worker]:
        pauses = self._journal.pauses()
        return [w for w in workers if (p := pauses.get(w.url)) and (p.by, p.path) == _OURS]

    async def _call_engines(
        self, workers: Sequence[Worker], target: str, headers: Mapping[str, str]
    ) -> list[WorkerResult]:
        call = Call("POST", target, headers=headers, timeout_secs=CALL_SECS)
        return await call_all(workers, call)


async def abort_all(workers: Sequence[Worker], headers: Mapping[str, str]) -> None:
    """Abort all requests; clients get the output so far with the finish reason `abort`."""
    headers = {**headers, **JSON_TYPE}
    call = Call("POST", ABORT_REQUESTS, b"{}", headers, timeout_secs=CALL_SECS)
    await call_all(workers, call)


_OURS: Final = (BY, START_UPDATE)
