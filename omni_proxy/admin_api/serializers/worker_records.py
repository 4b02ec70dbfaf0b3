"""Worker records as both dialects read them: the fleet's own, with smg's keys beside.

What only smg knows (labels, priority, cost) is kept here and shown, and nothing routes by it.
Invariant: notes live as long as their worker object and are never written to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from omni_proxy.admin_api.serializers.unroutable_reason import Why
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from omni_proxy.weight_sync.protocol.journal import PauseRecord

Pauses = Callable[[], Mapping[str, PauseRecord]]  # by worker URL
STATUS = {
    Health.UNKNOWN: "pending",
    Health.HEALTHY: "ready",
    Health.UNHEALTHY: "not_ready",
    Health.DEAD: "failed",
}


@dataclass(slots=True)
class Notes:
    """smg's remarks on a worker; the defaults are smg's."""

    priority: int = 50
    cost: float = 1.0
    labels: dict[str, object] = field(default_factory=dict)
    asked_at: datetime | None = None  # added in the background, and not seen well since


class WorkerRecords:
    """Reads the fleet; holds nothing but notes."""

    def __init__(
        self, fleet: Fleet, drains: WorkerDrains, reasons: Callable[[], Why], pauses: Pauses
    ) -> None:
        self._fleet = fleet
        self._reasons = reasons
        self._pauses = pauses
        self._drains = drains
        self._notes: dict[Worker, Notes] = {}

    def one(self, worker: Worker) -> dict[str, object]:
        return self._record(worker, self._reasons(), self._pauses())

    def _record(
        self, worker: Worker, why: Why, pauses: Mapping[str, PauseRecord]
    ) -> dict[str, object]:
        pause = pauses.get(worker.url)
        notes = self._notes.get(worker, Notes())
        return {
            **worker.record(),
            "why": why(worker),
            "paused": pause.told() if pause is not None else None,
            "draining": self._drains.get_record(worker),
            "model_id": worker.model,
            "worker_type": "regular",
            "connection_mode": "http",
            "is_healthy": worker.health.state is Health.HEALTHY,
            "status": STATUS[worker.health.state],
            "load": worker.in_flight,
            "priority": notes.priority,
            "cost": notes.cost,
            "labels": notes.labels,
        }

    def job(self, worker: Worker) -> dict[str, object]:
        """smg's status of an addition that goes on in the background; nothing once it is done."""
        notes = self._notes.get(worker)
        if notes is None or notes.asked_at is None:
            return {}
        machine = worker.health
        if machine.state is Health.HEALTHY:
            notes.asked_at = None
            return {}
        status = "processing" if machine.last_checked_at else "pending"
        if machine.state is Health.DEAD:
            status = "failed"
        told = {
            "job_type": "AddWorker",
            "worker_url": worker.url,
            "status": status,
            "message": machine.last_error or "waiting for its first probes",
            "timestamp": notes.asked_at.isoformat(),
        }
        return {"job_status": told}

    def pool(self, status: str, model: str | None = None) -> dict[str, object]:
        """The pool summary; `model` narrows the list of records, not the counts."""
        workers = [w for w in self._fleet.workers if model is None or w.model == model]
        why, pauses = self._reasons(), self._pauses()
        return {
            "status": status,
            **self._fleet.count_by_state(),
            "workers": [self._record(worker, why, pauses) for worker in workers],
        }

    def note(self, worker: Worker, remarks: dict[str, object]) -> None:
        """Keep the remarks, by the names that `Notes` has."""
        notes = self._notes.setdefault(worker, Notes())
        for name in Notes.__slots__:
            if name in remarks:
                setattr(notes, name, remarks[name])
        self._notes = {w: self._notes[w] for w in self._fleet.workers if w in self._notes}
