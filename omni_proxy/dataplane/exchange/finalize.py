"""The end of an exchange: what it holds is released, counted, and logged.

Invariant: `finalize` runs exactly once per exchange, called by the connection or by the fast path
in its place; after it the in-flight counts hold nothing of this exchange.
"""

from __future__ import annotations

from omni_proxy.dataplane.exchange.access_log import write_logs
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.fleet.worker import FAILED, SUCCEEDED


def finalize(services: ExchangeServices, exchange: Exchange, phase: str) -> None:
    """`phase`: what the connection was doing when the exchange ended."""
    worker, outcome = exchange.worker, exchange.outcome or "cut_by_proxy"
    exchange.phase = exchange.phase or phase
    exchange.ended_at = services.loop.now
    if worker is not None:
        result = FAILED
        if outcome == "completed" and 0 < exchange.status < 400:
            result = SUCCEEDED
        services.balancer.release(exchange, worker, result)
    else:
        worker = exchange.last_worker
    totals, recorders = services.totals, services.recorders
    if worker is not None and worker.version is not exchange.version:
        totals.across_versions += exchange.spans_versions(worker)
    services.inflight.leave(exchange)
    if services.queue.waiting:
        services.queue.serve()
    totals.ended[outcome] += 1
    if recorders.meters is not None:
        recorders.meters.record(exchange, worker)
    if recorders.access_log is not None or recorders.route_log is not None:
        write_logs(recorders, exchange, worker, as_json=services.settings.access_log_is_json)
