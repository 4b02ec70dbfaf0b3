"""The end of an exchange: releases its worker and its counts, then counts it and logs it.

Contract: `finalize` runs exactly once per exchange, called by the connection or the fast path;
afterwards the exchange is in none of the in-flight counts. It awaits nothing and sends nothing.
"""

from __future__ import annotations

from omni_proxy.dataplane.admission.caller_admission import end_call
from omni_proxy.dataplane.exchange.access_log import write_logs
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.span_records import encode_spans
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.dataplane.upstream.response_reports import settle_prediction
from omni_proxy.fleet.worker import FAILED, SUCCEEDED, Worker


def finalize(
    services: ExchangeServices, exchange: Exchange, phase: str, has_extras: bool = True
) -> None:
    """Release the resources of the exchange, count it and log it. `phase`: of the connection when
    it ended. `has_extras`: it may have a part that `_settle_extras` ends."""
    worker, outcome = exchange.worker, exchange.outcome or "cut_by_proxy"
    exchange.phase = exchange.phase or phase
    exchange.ended_at = services.loop.now
    if worker is not None:
        result = FAILED
        if outcome == "completed" and exchange.status < 400:
            result = SUCCEEDED
        services.balancer.release(exchange, worker, result)
    else:
        worker = exchange.last_worker
    if has_extras:
        _settle_extras(services, exchange, worker)
    recorders = services.recorders
    services.inflight.dismiss(exchange)
    if services.queue.waiting:
        services.queue.serve()
    services.totals.ended[outcome] += 1
    if recorders.meters is not None:
        recorders.meters.record(exchange, worker)
    if recorders.access_log is not None or recorders.route_log is not None:
        write_logs(recorders, exchange, worker, as_json=services.settings.access_log_is_json)


def _settle_extras(services: ExchangeServices, exchange: Exchange, worker: Worker | None) -> None:
    """End the parts that only some exchanges have: another leg, a trace, a caller, a policy or
    metrics that read the response, and other weights at its end than at its start."""
    if worker is not None and worker.weight_version is not exchange.weight_version:
        services.totals.across_versions += exchange.spans_versions(worker)
    if exchange.legs is not None:
        services.balancer.release_prefill(exchange.legs)
    trace, recorders = exchange.trace, services.recorders
    if trace is not None and trace.sampled and recorders.spans is not None:
        recorders.spans.write(encode_spans(exchange, trace, services.loop.clock()))
        if recorders.meters is not None:
            recorders.meters.note_trace(exchange, worker)
    if exchange.caller is not None:
        end_call(exchange, exchange.caller)
    need = exchange.requirements
    if need is not None and need.prediction is not None:
        settle_prediction(recorders, exchange, need)
    if not services.settings.counts_usage:
        exchange.last_chunk = b""
