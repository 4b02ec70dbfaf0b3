"""The JSON of GET /weights; its keys are documented in docs/http.md.

Invariant: it waits for nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.operations.operation_queue import OperationQueue, operation_record
from omni_proxy.weight_sync.protocol.journal import PauseRecord
from omni_proxy.weight_sync.state_journal import StateJournal
from omni_proxy.weight_sync.weight_operations import WeightOperations


def weight_status(operations: WeightOperations) -> dict[str, object]:
    return {
        **_queue_record(operations.queue),
        "sync": operations.sync.status(),
        "rollout": operations.rollouts.status(),
        "store": operations.version_service.status(),
        **_journal_record(operations.journal, operations.fleet.workers),
        "history": list(operations.history.rows),
    }


def pause_record(pause: PauseRecord | None) -> dict[str, str | None] | None:
    """Why an engine is paused, with null for an unknown value; None if it is not paused."""
    if pause is None:
        return None
    values = {"at": pause.at, "by": pause.by, "path": pause.path, "mode": pause.mode}
    return {name: value or None for name, value in values.items()}


def _queue_record(queue: OperationQueue) -> dict[str, object]:
    now = trio.current_time()
    return {
        "operation": operation_record(queue.current, now) if queue.current else None,
        "waiting": [operation_record(operation, now) for operation in queue.waiting],
    }


def _journal_record(journal: StateJournal, workers: Sequence[Worker]) -> dict[str, object]:
    """The published version, uncertain and paused workers, a row per worker, the journal file."""
    return {
        "weight_epoch": journal.published.epoch,
        "weight_version": journal.published.label,
        "workers": [_worker_row(worker, journal) for worker in workers],
        "uncertain": dict(journal.uncertain),
        "paused": {url: pause_record(pause) for url, pause in journal.pauses().items()},
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
        "weight_version": worker.weight_label,
        "weight_epoch": worker.weight_epoch,
        "routable": worker.routable,
        "held_by": sorted(worker.cordon_reasons),
        "uncertain": journal.uncertain.get(worker.url),
    }
