"""Finds workers that have requests in flight and send nothing, long before their probes fail.

Invariant: it is pure, its memory is bounded by the fleet, and each tick visits a fifth of the
workers. Progress is an exchange that ends or a further chunk of a stream; WebSocket sessions for
speech don't count, because they may be silent for any time.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import FAILED, ROUTED, SUCCEEDED, Worker, counter_offset
from omni_proxy.telemetry.histogram import quantile
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow

PARTS: Final = 5  # each tick checks one part, so each worker is checked every five seconds
MIN_SECS: Final = 15.0
SLOW_FACTOR: Final = 3.0  # factor over the worker's typical time to the first chunk
TYPICAL_QUANTILE: Final = 0.95  # quantile that counts as typical: earlier stalls must not raise it
UNKNOWN_SECS: Final = 60.0  # for a worker that has sent no response so far
SESSIONS: Final = "tts_websocket"


class EngineStallDetector:
    """Call `tick` once a second, with the Unix time."""

    def __init__(self, fleet: Fleet, meters: Metrics, recent: RecentWindow) -> None:
        self._fleet = fleet
        self._meters = meters
        self._recent = recent
        self._part = 0
        # Progress at the last check, and the time since which it has not changed.
        self._progress: dict[Worker, tuple[int, float]] = {}

    def tick(self, at: float) -> None:
        workers = self._fleet.workers
        self._part = (self._part + 1) % PARTS
        for worker in islice(workers, self._part, None, PARTS):
            progress = self._count_progress(worker)
            if not _busy(worker):
                self._progress.pop(worker, None)
            elif worker not in self._progress or self._progress[worker][0] != progress:
                self._progress[worker] = progress, at
        if len(self._progress) > len(workers):
            current = set(workers)
            self._progress = {
                watched: progress
                for watched, progress in self._progress.items()
                if watched in current
            }

    def silent_secs(self, worker: Worker, at: float) -> float | None:
        """Seconds without progress, if that is unusually long for this worker, else None."""
        if worker not in self._progress or not _busy(worker):
            return None
        progress, since = self._progress[worker]
        secs = at - since
        if secs < MIN_SECS or progress != self._count_progress(worker):
            return None
        return round(secs, 1) if secs >= self._slow_after_secs(worker) else None

    def _slow_after_secs(self, worker: Worker) -> float:
        self._recent.gather(worker)
        slot = self._recent.sums.get(worker)
        typical = quantile(slot.firsts, TYPICAL_QUANTILE) if slot is not None else None
        return UNKNOWN_SECS if typical is None else SLOW_FACTOR * typical

    def _count_progress(self, worker: Worker) -> int:
        ended = sum(worker.succeeded.values()) + sum(worker.failed.values())
        return ended + self._meters.count_gaps(worker)


def _busy(worker: Worker) -> bool:
    in_flight = worker.in_flight - worker.peer_in_flight
    if not in_flight:
        return False
    routed, succeeded, failed = (
        worker.counts[counter_offset(SESSIONS) + kind] for kind in (ROUTED, SUCCEEDED, FAILED)
    )
    return in_flight > routed - succeeded - failed
