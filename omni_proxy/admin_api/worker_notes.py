"""What clients of sgl-model-gateway attach to a worker, and the status of their background
additions.

Labels, priority and cost are kept and shown; nothing routes by them. Invariant: notes live as long
as their worker object and are never written to disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker


@dataclass(slots=True)
class WorkerNote:
    """The defaults are those of sgl-model-gateway."""

    priority: int = 50
    cost: float = 1.0
    labels: dict[str, object] = field(default_factory=dict)
    asked_at: datetime | None = None  # added in the background, and not healthy since


class WorkerNotes:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._notes: dict[Worker, WorkerNote] = {}

    def get(self, worker: Worker) -> WorkerNote:
        return self._notes.get(worker) or WorkerNote()

    def update(self, worker: Worker, fields: Mapping[str, object]) -> None:
        """Set those of `fields` that `WorkerNote` has; others are ignored."""
        note = self._notes.setdefault(worker, WorkerNote())
        for name in WorkerNote.__slots__:
            if name in fields:
                setattr(note, name, fields[name])
        self._notes = {w: self._notes[w] for w in self._fleet.workers if w in self._notes}

    def job_status(self, worker: Worker) -> dict[str, object]:
        """`{"job_status": ...}` of an addition in the background; empty once it is done."""
        note = self._notes.get(worker)
        if note is None or note.asked_at is None:
            return {}
        health = worker.health
        if health.state is Health.HEALTHY:
            note.asked_at = None
            return {}
        status = "processing" if health.last_checked_at else "pending"
        if health.state is Health.DEAD:
            status = "failed"
        job = {
            "job_type": "AddWorker",
            "worker_url": worker.url,
            "status": status,
            "message": health.last_error or "waiting for its first probes",
            "timestamp": note.asked_at.isoformat(),
        }
        return {"job_status": job}
