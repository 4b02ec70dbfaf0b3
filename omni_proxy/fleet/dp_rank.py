"""A data-parallel rank: one of the engines behind a worker's URL, as policies see it.

Each rank has its own scheduler and prefix cache, so it is picked, counted and bounded separately.
All other attributes are read from its worker: URL to dial, connections, credentials, health,
cordons, weights. Invariant: a request in flight at a rank is counted at the rank and at its worker,
so the counts of all ranks that a worker ever had add up to the worker's own. A rank stays the same
object while its worker is in the fleet, even while `ranks` excludes it, so requests that are still
in flight are counted when it is included again. Pure. Source: note:features 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omni_proxy.fleet.worker import Worker, zero_counters
from omni_proxy.wire.header_fields import RANK_NAME


class DpRank(Worker):
    """A rank of `worker`. Attributes that are not set here are read from the worker."""

    __slots__ = ("_worker", "header_line", "index")

    def __init__(self, worker: Worker, index: int) -> None:
        # Worker.__init__ is not called: it would hide the worker's attributes.
        self._worker = worker
        self.index = index
        # URL@RANK is the notation of other routers; this URL is never dialled.
        self.url = f"{worker.url}@{index}"
        self.id = f"{worker.id}@{index}"
        self.display_id = f"{worker.display_id}@{index}"
        self.header_line = b"%b: %d\r\n" % (RANK_NAME, index)
        self.in_flight = self.peer_in_flight = 0
        self.load_offset = 0  # CPython adds ints faster
        self.peak_in_flight = 0
        self.counts = zero_counters()
        self.dp_ranks = ()
        self.engine_load = None
        self.is_plain = False
        self.follow_worker(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    @property
    def worker(self) -> Worker:
        return self._worker

    def follow_worker(self, ranks: int) -> None:
        """Copy the settings that a pick reads most often. `ranks`: how many the worker has. A rank
        gets its share of the worker's `max_inflight`, rounded up; the worker's own bound still
        applies."""
        self.weight, self.model = self.worker.weight, self.worker.model
        self.max_inflight = self.inflight_bound = -(-self.worker.max_inflight // ranks)


def with_ranks(workers: Sequence[Worker]) -> list[Worker]:
    """The workers, with each worker that has ranks replaced by its ranks. All first ranks come
    before all second ranks, so that round robin spreads consecutive requests over the workers."""
    most_ranks = max((len(worker.dp_ranks) for worker in workers), default=0)
    targets: list[Worker] = []
    for index in range(max(1, most_ranks)):
        for worker in workers:
            if index < len(worker.dp_ranks):
                targets.append(worker.dp_ranks[index])
            elif not index:
                targets.append(worker)
    return targets
