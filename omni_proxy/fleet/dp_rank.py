"""A data-parallel rank: one of the engines behind a worker's URL, as policies see it.

Each rank has a scheduler and a prefix cache of its own, so it is picked, counted and bounded by
itself. Everything else is its worker's, and read there: URL to dial, connections, credentials,
health, cordons, weights. Invariant: a request in flight at a rank is counted at the rank and at its
worker, so the counts of all ranks that a worker ever had add up to the worker's own. A rank stays
the same object while its worker is in the fleet, also while `ranks` leaves it out: what it has in
flight is still counted when it comes back. Must not do I/O. Source: features.md 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omni_proxy.fleet.worker import Worker, zero_counters

HEADER = "X-data-parallel-rank"  # vLLM and SGLang read it


class DpRank(Worker):
    """A rank of `worker`, to which it also leaves every attribute that is not set here."""

    __slots__ = ("_worker", "header_line", "index")

    def __init__(self, worker: Worker, index: int) -> None:
        # Not Worker.__init__: what it would set is the worker's.
        self._worker = worker
        self.index = index
        # As other routers write them; nothing dials this URL.
        self.url = f"{worker.url}@{index}"
        self.id = f"{worker.id}@{index}"
        self.display_id = f"{worker.display_id}@{index}"
        self.header_line = f"{HEADER}: {index}\r\n".encode()
        self.in_flight = self.in_flight_elsewhere = 0
        self.load_offset = 0.0
        self.peak_in_flight = 0
        self.counts = zero_counters()
        self.dp_ranks = ()
        self.engine_load = None
        self.is_plain = False
        self.follow_worker(1)

    def __getattr__(self, name: str) -> Any:
        """An attribute that is not the rank's own."""
        return getattr(self._worker, name)

    @property
    def worker(self) -> Worker:
        return self._worker

    def follow_worker(self, ranks: int) -> None:
        """Take over the settings that a pick reads most often. `ranks`: of the worker. A rank has
        its share of the worker's `max_inflight`, rounded up; the worker's own bound holds, too."""
        self.weight, self.model = self.worker.weight, self.worker.model
        self.max_inflight = self.inflight_bound = -(-self.worker.max_inflight // ranks)


def with_ranks(workers: Sequence[Worker]) -> list[Worker]:
    """Each worker that has ranks replaced by them. Their first ranks come first, then their second
    ones: policies that take turns then spread neighbouring requests over the workers."""
    most = max((len(worker.dp_ranks) for worker in workers), default=0)
    targets: list[Worker] = []
    for index in range(max(1, most)):
        for worker in workers:
            if index < len(worker.dp_ranks):
                targets.append(worker.dp_ranks[index])
            elif not index:
                targets.append(worker)
    return targets
