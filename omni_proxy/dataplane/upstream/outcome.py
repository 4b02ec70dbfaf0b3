"""After the last attempt: reports the result to outlier ejection.

Contract: outlier ejection gets broken bodies and successful responses; never a disconnect of the
client.
"""

from __future__ import annotations

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.dataplane.upstream.acquire import report_failure, report_success
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.routes import VOICE_OWNER


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
    """Whether an upload or deletion succeeded: its worker owns the voices (omni-router.md 13)."""
    return exchange.method in ("POST", "DELETE") and 200 <= exchange.status < 300
