"""The last operations, and counters over all: for GET /weights, metrics and tracing."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import trio

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.weight_sync.operations.operation_records import worker_rows

HISTORY_LENGTH: Final = 50


def _ignore(operation: Operation, response: AdminResponse, secs: float) -> None:
    """The default `on_end`, used without tracing."""


class OperationHistory:
    """The last operations, newest last, and counters over all of them by path."""

    def __init__(self) -> None:
        self.rows: deque[dict[str, object]] = deque(maxlen=HISTORY_LENGTH)
        self.ended: Counter[tuple[str, bool]] = Counter()  # by path and success
        self.spent_secs: dict[str, float] = {}  # by path: sum of the times from request to end
        # Called with each operation that ended, its response, and its duration in seconds.
        self.on_end: Callable[[Operation, AdminResponse, float], None] = _ignore

    def record(self, operation: Operation, response: AdminResponse) -> None:
        now = trio.current_time()
        path = operation.route.path
        self.ended[path, response.ok] += 1
        self.spent_secs[path] = self.spent_secs.get(path, 0.0) + now - operation.requested_at
        self.on_end(operation, response, now - operation.requested_at)
        self.rows.append(
            {
                "id": operation.id,
                "path": operation.route.path,
                "caller": operation.caller,
                "ended_at": datetime.now(UTC).isoformat(),
                "secs": round(now - operation.requested_at, 3),
                "http_status": response.status,
                "success": response.ok,
                "message": response.body.get("message"),
                "weight_epoch": response.body.get("weight_epoch"),
                "workers": worker_rows(operation),
            }
        )
