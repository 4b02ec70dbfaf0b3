"""Reports results of attempts to outlier ejection, and uploads of voices to the voice registry.

Invariant: a failure is reported for what the worker did: a failed connection, a status that counts
as a failure, a broken body; never for a disconnect of the client. A success is reported only after
failures, since only then does it count. Rules of ejection: `fleet/outlier_ejection.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.routes import VOICE_OWNER


def report_failure(
    fleet: Fleet, exchange: Exchange, worker: Worker, error: str, status: int | None = None
) -> None:
    """Report a failure of the worker to outlier ejection."""
    fleet.observe_request_failure(
        worker, status=status, error=error, at=datetime.now(UTC), half_open_id=exchange.half_open_id
    )


def report_success(fleet: Fleet, exchange: Exchange, worker: Worker) -> None:
    """Report a success of the worker to outlier ejection, which counts only after failures."""
    if worker.health.failed_requests:
        fleet.observe_success(worker, exchange.half_open_id)


def report_end(services: ExchangeServices, exchange: Exchange, worker: Worker) -> None:
    """Report the end of a response to outlier ejection and the voice registry."""
    route = exchange.route
    if exchange.error and exchange.ended_by == "worker":
        report_failure(services.fleet, exchange, worker, exchange.error)
    elif exchange.outcome == "completed" and exchange.status < 500:
        report_success(services.fleet, exchange, worker)
    if route is not None and route.pinning is VOICE_OWNER and _changed_voices(exchange):
        services.keep_voices_at(worker)


def _changed_voices(exchange: Exchange) -> bool:
    """Whether an upload or deletion succeeded: its worker owns the voices (note:omni-router 13)."""
    return exchange.method in ("POST", "DELETE") and 200 <= exchange.status < 300


def counts_as_failed(status: int, retry_on: Collection[str]) -> bool:
    """Whether a worker's response with this status counts against it.

    A gateway's 502 and 504 always do. A 503 means "busy", which is no failure. Other 5xx do if they
    are retried: a retry of a 500 implies that it is a failure of the worker.
    """
    if status < 500 or status == 503:
        return False
    return status in (502, 504) or str(status) in retry_on


class FailedStatuses:
    """Reports statuses that count against a worker (`counts_as_failed`) to outlier ejection.

    Once for each worker that one request was sent to: otherwise a request that no worker can answer
    would eject a worker by its own retries.
    """

    __slots__ = ("_reported",)

    def __init__(self) -> None:
        self._reported: set[Worker] = set()

    def report(
        self, services: ExchangeServices, exchange: Exchange, worker: Worker, status: int
    ) -> None:
        if not counts_as_failed(status, services.settings.config.routing.retry_on):
            return
        if worker not in self._reported:
            self._reported.add(worker)
            report_failure(services.fleet, exchange, worker, f"status={status}", status)
