"""Workers on this machine read a version while it still comes, bucket by bucket.

It only saves time. Invariant: nothing that a worker does with it shows before the version is whole,
sealed and delivered; whoever has no such route, fails or is slow reads all of it then, and no step
of a sync waits for that.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from omni_proxy.admin_ops.results import WorkerResult, parsed
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.worker import Worker
from omni_proxy.process_group.receiver import FileRegion, PendingReceive, TensorPlan
from omni_proxy.upstream_http.client import Call, call_worker
from omni_proxy.weight_sync.delivery.deliver import here

AHEAD: Final = "/read_weights_ahead"
CALL_SECS: Final = 30.0
# So long may the thread that waits for a bucket outlive who has given it up.
LOOK_SECS: Final = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Coming:
    """One receive under way, and where in which file its buckets lie, one behind the other."""

    armed: PendingReceive
    place: FileRegion
    plans: tuple[TensorPlan, ...]

    def final_bytes(self, buckets_done: int) -> int:
        """How many of the file's first bytes will not change any more."""
        if not buckets_done:
            return 0
        return self.place.starts[buckets_done - 1] + self.plans[buckets_done - 1].block_bytes


class Prefetch:
    """One version at a time; nothing happens without a `nursery`."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(4)
        self._scope = trio.CancelScope()
        self.nursery: trio.Nursery | None = None

    def begin(self, coming: Coming, workers: Sequence[Worker], headers: Mapping[str, str]) -> None:
        """Has those of them read along that are here and well; returns at once."""
        self.end()
        near = [w for w in workers if w.health.state is Health.HEALTHY and here(w.address)]
        if near and self.nursery is not None:
            self._scope = trio.CancelScope()
            self.nursery.start_soon(self._run, _Following(coming, headers), near, self._scope)

    def end(self) -> None:
        """Nobody is told anything more; what was read stays with who has read it."""
        self._scope.cancel()

    async def _run(
        self, following: _Following, workers: Sequence[Worker], scope: trio.CancelScope
    ) -> None:
        with scope:
            async with trio.open_nursery() as watching:
                watching.start_soon(following.watch, self._threads)
                async with trio.open_nursery() as nursery:
                    for worker in workers:
                        nursery.start_soon(following.lead, worker)
                watching.cancel_scope.cancel()


class _Following:
    """How far one version has come, and who is told of it."""

    def __init__(self, coming: Coming, headers: Mapping[str, str]) -> None:
        self._coming = coming
        self._headers = {**headers, "content-type": "application/json"}
        self._final_bytes = 0
        self._over = False
        self._news = trio.Event()

    async def watch(self, threads: trio.CapacityLimiter) -> None:
        armed, done = self._coming.armed, 0
        while not self._over:
            progress = await trio.to_thread.run_sync(
                armed.wait_past,
                done,
                LOOK_SECS,
                thread_name="weights-ahead",
                limiter=threads,
                abandon_on_cancel=True,
            )
            done = progress.buckets_done
            self._final_bytes = self._coming.final_bytes(done)
            self._over = armed.fault() is not None or done == len(self._coming.plans)
            news, self._news = self._news, trio.Event()
            news.set()

    async def lead(self, worker: Worker) -> None:
        """Until all has come, or it does not read along."""
        told = 0
        while not self._over or self._final_bytes > told:
            if (upto := self._final_bytes) <= told:
                await self._news.wait()
                continue
            answer = await self._tell(worker, upto)
            if self._coming.armed.fault() is not None:
                return
            if not answer.success or not _takes_any(answer):
                _log.debug("%s reads no version ahead: %s", worker.url, answer.why)
                return
            told = upto

    async def _tell(self, worker: Worker, upto: int) -> WorkerResult:
        body = json.dumps({"model_path": self._coming.place.path, "nbytes": upto}).encode()
        call = Call("POST", AHEAD, body, self._headers, timeout_secs=CALL_SECS)
        outcome = await call_worker(worker, call)
        told = parsed(outcome.body)
        return WorkerResult(worker.url, outcome.status, told, outcome.error, outcome.secs)


def _takes_any(answer: WorkerResult) -> bool:
    """Whether any rank of it can keep some of the bytes as they are."""
    results: Any = answer.body.get("results") if isinstance(answer.body, dict) else None
    data = [each.get("data") for each in results or () if isinstance(each, dict)]
    return any(isinstance(each, dict) and each.get("ahead_bytes") for each in data)
