"""Prefetch: workers on this machine read a version bucket by bucket while it is being received.

It is only an optimization. Invariant: what a worker has read takes effect only after the version is
complete, sealed and delivered. A worker that lacks the route, fails or is slow reads the whole
version at its delivery, and no step of a sync waits for a prefetch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.receiver import FileRegion, PendingReceive, TensorPlan
from omni_proxy.upstream_http.client import JSON_TYPE, Call
from omni_proxy.weight_sync.delivery.deliver import is_local_address
from omni_proxy.weight_sync.worker_calls import request_worker

PREFETCH_PATH: Final = "/read_weights_ahead"
CALL_SECS: Final = 30.0
# Longest wait of a thread for a bucket, so that an abandoned thread ends.
BUCKET_WAIT_SECS: Final = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncomingVersion:
    """A receive in progress. `region`: the file and the offsets of its buckets, in order."""

    pending: PendingReceive
    region: FileRegion
    plans: tuple[TensorPlan, ...]

    def final_bytes(self, buckets_done: int) -> int:
        """Number of leading bytes of the file that are final."""
        if not buckets_done:
            return 0
        return self.region.starts[buckets_done - 1] + self.plans[buckets_done - 1].block_bytes


class Prefetch:
    """Prefetches one version at a time. Without a `nursery` it does nothing."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(4)
        self._scope = trio.CancelScope()
        self.nursery: trio.Nursery | None = None

    def begin(
        self, incoming: IncomingVersion, workers: Sequence[Worker], headers: Mapping[str, str]
    ) -> None:
        """Start a prefetch for the healthy workers on this machine, without waiting."""
        self.end()
        healthy = [w for w in workers if w.health.state is Health.HEALTHY]
        local = [worker for worker in healthy if is_local_address(worker.address)]
        if local and self.nursery is not None:
            self._scope = trio.CancelScope()
            announcer = _Announcer(incoming, headers)
            self.nursery.start_soon(self._run, announcer, local, self._scope)

    def end(self) -> None:
        """Send no more calls; workers keep what they have read."""
        self._scope.cancel()

    async def _run(
        self, announcer: _Announcer, workers: Sequence[Worker], scope: trio.CancelScope
    ) -> None:
        with scope:
            async with trio.open_nursery() as watching:
                watching.start_soon(announcer.watch, self._threads)
                async with trio.open_nursery() as nursery:
                    for worker in workers:
                        nursery.start_soon(announcer.announce_to, worker)
                watching.cancel_scope.cancel()


class _Announcer:
    """Follows one receive, and announces its progress to workers."""

    def __init__(self, incoming: IncomingVersion, headers: Mapping[str, str]) -> None:
        self._incoming = incoming
        self._headers = {**headers, **JSON_TYPE}
        self._final_bytes = 0
        self._over = False
        self._progressed = trio.Event()

    async def watch(self, threads: trio.CapacityLimiter) -> None:
        pending, done = self._incoming.pending, 0
        while not self._over:
            progress = await trio.to_thread.run_sync(
                pending.wait_past,
                done,
                BUCKET_WAIT_SECS,
                thread_name="weights-prefetch",
                limiter=threads,
                abandon_on_cancel=True,
            )
            done = progress.buckets_done
            self._final_bytes = self._incoming.final_bytes(done)
            self._over = pending.fault() is not None or done == len(self._incoming.plans)
            progressed, self._progressed = self._progressed, trio.Event()
            progressed.set()

    async def announce_to(self, worker: Worker) -> None:
        """Announce progress until all is received, or the worker declines or fails."""
        announced = 0
        while not self._over or self._final_bytes > announced:
            if (upto := self._final_bytes) <= announced:
                await self._progressed.wait()
                continue
            result = await self._announce(worker, upto)
            if self._incoming.pending.fault() is not None:
                return
            if not result.success or not _keeps_any(result):
                _log.debug("prefetch_declined worker=%s reason=%s", worker.url, result.reason)
                return
            announced = upto

    async def _announce(self, worker: Worker, upto: int) -> WorkerResult:
        body = json.dumps({"model_path": self._incoming.region.path, "nbytes": upto}).encode()
        call = Call("POST", PREFETCH_PATH, body, self._headers, timeout_secs=CALL_SECS)
        return await request_worker(worker, call)


def _keeps_any(result: WorkerResult) -> bool:
    """Whether any rank of the worker keeps some of the bytes that it has read."""
    results: Any = result.body.get("results") if isinstance(result.body, dict) else None
    data = [row.get("data") for row in results or () if isinstance(row, dict)]
    return any(isinstance(stage, dict) and stage.get("ahead_bytes") for stage in data)
