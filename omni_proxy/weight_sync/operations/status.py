"""JSON shapes of weight operations: the status of the service, a row per worker, the history.

Keys are documented in docs/http.md (GET /weights/status).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import trio

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.operations.operation_queue import OperationQueue
from omni_proxy.weight_sync.state.state_journal import StateJournal

HISTORY_LENGTH: Final = 50


class OperationHistory:
    """The last operations, newest last, and counters over all of them by path."""

    def __init__(self) -> None:
        self.rows: deque[dict[str, object]] = deque(maxlen=HISTORY_LENGTH)
        self.ended: Counter[tuple[str, bool]] = Counter()  # by path and success
        self.spent_secs: dict[str, float] = {}  # by path, from request to end

    def record(self, operation: Operation, response: AdminResponse) -> None:
        now = trio.current_time()
        path = operation.route.path
        self.ended[path, response.ok] += 1
        self.spent_secs[path] = self.spent_secs.get(path, 0.0) + now - operation.asked_at
        self.rows.append(
            {
                "id": operation.id,
                "path": operation.route.path,
                "caller": operation.caller,
                "ended_at": datetime.now(UTC).isoformat(),
                "secs": round(now - operation.asked_at, 3),
                "http_status": response.status,
                "success": response.ok,
                "message": response.body.get("message"),
                "weight_epoch": response.body.get("weight_epoch"),
                "workers": operation.progress(),
            }
        )


def queue_status(queue: OperationQueue) -> dict[str, object]:
    now = trio.current_time()
    return {
        "operation": queue.current.status(now) if queue.current else None,
        "waiting": [operation.status(now) for operation in queue.waiting],
    }


def journal_status(journal: StateJournal, workers: Sequence[Worker]) -> dict[str, object]:
    """The published version, uncertain and paused workers, a row per worker, the journal file."""
    return {
        "weight_epoch": journal.published.epoch,
        "weight_version": journal.published.label,
        "workers": [_worker_row(worker, journal) for worker in workers],
        "uncertain": dict(journal.uncertain),
        "paused": {url: pause.to_dict() for url, pause in journal.pauses().items()},
        "journal": {
            "path": journal.path,
            "readable": journal.readable,
            "error": journal.error or None,
        },
    }


def _worker_row(worker: Worker, journal: StateJournal) -> dict[str, object]:
    return {
        "worker": worker.url,
        "worker_id": worker.id,
        "weight_version": worker.weight_version,
        "weight_epoch": worker.weight_epoch,
        "routable": worker.routable,
        "held_by": sorted(worker.cordon_reasons),
        "uncertain": journal.uncertain.get(worker.url),
    }
