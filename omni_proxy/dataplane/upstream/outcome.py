"""After the last attempt: what is no longer needed, and what its end says about the worker.

Contract: outlier ejection is told of broken bodies and of responses that ended well; never of a
client that left.
"""

from __future__ import annotations

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.exchange_io import ExchangeIO
from omni_proxy.dataplane.upstream.acquire import report_failure
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.routes import VOICE_OWNER


def release_body(io: ExchangeIO, exchange: Exchange) -> None:
    """The request is not sent again, and no other worker is chosen for it."""
    exchange.body = b""
    if exchange.requirements is not None:
        exchange.requirements.body_fields = None  # which refers to it, too
    if exchange.held_bytes:
        io.services.inflight.release_bytes(exchange)


def report_end(io: ExchangeIO, exchange: Exchange, worker: Worker) -> None:
    """What the end of a response says about its worker."""
    services, route = io.services, exchange.route
    if exchange.error and exchange.ended_by == "worker":
        report_failure(services.fleet, exchange, worker, exchange.error)
    elif (
        exchange.outcome == "completed" and exchange.status < 500 and worker.health.failed_requests
    ):
        services.fleet.observe_success(worker, exchange.half_open_id)
    if route is not None and route.pinning is VOICE_OWNER and _changed_voices(exchange):
        services.keep_voices_at(worker)


def _changed_voices(exchange: Exchange) -> bool:
    """From the first upload on its worker is the one that keeps the voices (omni-router.md 13)."""
    return exchange.method in ("POST", "DELETE") and 200 <= exchange.status < 300
