"""The records of the access log and the route log for an exchange that has ended.

Invariant: secrets in the query are masked; other text of clients is escaped, so that a record is
one line without control characters. JSON is ASCII. Source of the route log's keys:
note:omni-router 14.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec

from omni_proxy.dataplane.exchange.exchange import Exchange, Recorders
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.shared.log_text import ascii_json, escape_match

_encode = msgspec.json.encode
_UNSHOWN = re.compile(r"[\s\\\x00-\x1f\x7f]|[^\x00-\x7f]")


def write_logs(
    recorders: Recorders, exchange: Exchange, worker: Worker | None, *, as_json: bool
) -> None:
    """Write one line to each enabled log. `as_json`: format of the access log."""
    if recorders.access_log is not None:
        line = access_record(exchange, worker)
        recorders.access_log.write(ascii_json(line) if as_json else access_text(line))
    if recorders.route_log is not None and worker is not None:
        record = _encode(route_record(exchange, worker), order="sorted")
        recorders.route_log.write(ascii_json(record))


def _id_text(exchange: Exchange) -> str:
    return exchange.request_id.decode("latin-1")


def _ms(later: float, earlier: float) -> float | None:
    return round((later - earlier) * 1000, 3) if later and earlier else None


def access_record(exchange: Exchange, worker: Worker | None) -> bytes:
    """The access log record as a JSON line. Each time is counted from the first byte of the
    request."""
    start, need = exchange.started_at, exchange.requirements
    spans = worker is not None and exchange.spans_versions(worker)
    record = {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": exchange.client,
        "key": exchange.caller.name if exchange.caller is not None else None,
        "method": exchange.method,
        "target": exchange.target,
        "status": exchange.status,
        "outcome": exchange.outcome or "cut_by_proxy",
        "ended_by": exchange.ended_by,
        "phase": exchange.phase,
        "error": exchange.error or None,
        "request_id": _id_text(exchange) or None,
        **_trace_fields(exchange),
        "model": need.asked_model if need else None,
        "target_model": need.target_model if need else None,
        "stream": exchange.stream,
        "worker": worker.url if worker else None,
        "rank": _rank_index(exchange),
        **_legs_fields(exchange, worker),
        "policy": exchange.policy or None,
        "attempts": exchange.attempts,
        "weight_version": exchange.weight_version.label,
        "weight_epoch": exchange.weight_version.epoch or None,
        "weight_version_end": worker.weight_version.shown if worker is not None and spans else None,
        "tried": [
            {"worker": tried.url, "outcome": outcome}
            for tried, outcome in exchange.attempt_results()
        ],
        "queue_ms": round(exchange.queued_secs * 1000, 3),
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
        "chunks": exchange.chunks,
        "head_ms": _ms(exchange.head_at, start),
        "body_ms": _ms(exchange.body_at, start),
        "connect_ms": _ms(exchange.sent_at, start),
        "response_head_ms": _ms(exchange.response_head_at, start),
        "first_byte_ms": _ms(exchange.first_at, start),
        "total_ms": _ms(exchange.ended_at, start),
        # Old names, for one release.
        "pieces": exchange.chunks,
        "answer_ms": _ms(exchange.response_head_at, start),
        "first_ms": _ms(exchange.first_at, start),
    }
    return _encode(record)


def _legs_fields(exchange: Exchange, worker: Worker | None) -> dict[str, object]:
    """Fields of a request in two legs: both workers, and the time of each leg."""
    legs = exchange.legs
    if legs is None:
        return {}
    prefill, fields = legs.prefill, dict[str, object]()
    if prefill is not None and (target := prefill.sent_to) is not None:
        fields = {
            "prefill": target.worker.url,
            "prefill_rank": target.index if isinstance(target, DpRank) else None,
            "prefill_status": prefill.status or None,
            "prefill_ms": _ms(prefill.ended_at, prefill.started_at),
        }
    return fields | {
        "decode": worker.url if worker else None,
        "decode_ms": _ms(exchange.ended_at, exchange.sent_at),
        "fallback": legs.fallback or None,
        "transfer_failures": legs.transfer_failures,
    }


def _trace_fields(exchange: Exchange) -> dict[str, object]:
    trace = exchange.trace
    return {"trace_id": trace.trace_id.decode()} if trace is not None and trace.sampled else {}


def _rank_index(exchange: Exchange) -> int | None:
    """The data-parallel rank of the last attempt; None if its worker has no ranks."""
    target = exchange.sent_to
    return target.index if isinstance(target, DpRank) else None


def access_text(line: bytes) -> bytes:
    """The access log record as readable text, without empty fields. No field contains a space."""
    record = msgspec.json.decode(line)
    tried = record.pop("tried")
    if len(tried) > 1:
        record["tried"] = ",".join(f"{attempt['worker']}={attempt['outcome']}" for attempt in tried)
    fields_text = [
        f"{record.pop(key)}" for key in ("at", "client", "method", "target", "status", "outcome")
    ]
    fields_text += (
        f"{key}={str(value).lower() if value is True else value}"
        for key, value in record.items()
        if value not in (None, "", 0) or (key == "rank" and value is not None)
    )
    return " ".join(_UNSHOWN.sub(_escaped, text) for text in fields_text).encode()


def _escaped(match: re.Match[str]) -> str:
    """Escape a character, so that text of clients can't inject lines or fields."""
    return "\\x20" if match[0] == " " else escape_match(match)


def route_record(exchange: Exchange, worker: Worker) -> dict[str, object]:
    need, route = exchange.requirements, exchange.route
    state, disabled, routable = exchange.worker_seen
    completed = exchange.outcome == "completed"
    completed_event = "stream_complete" if exchange.stream else "request_complete"
    failed_event = "stream_error" if exchange.stream else "request_complete"
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "event": completed_event if completed else failed_event,
        "request_id": _id_text(exchange),
        **_trace_fields(exchange),
        "method": exchange.method,
        "path": exchange.target.partition("?")[0],
        "model": need.asked_model if need else None,
        "target_model": need.target_model if need else None,
        "stream": exchange.stream,
        "required_capabilities": need.capabilities if need else [],
        "worker_id": worker.id,
        "worker_url": worker.url,
        **({} if (rank := _rank_index(exchange)) is None else {"dp_rank": rank}),
        **_legs_fields(exchange, worker),
        "policy": exchange.policy,
        "worker_state": state,
        "worker_health_state": state,
        "worker_disabled": disabled,
        "worker_routable": routable,
        "attempt": exchange.attempts,
        "status_code": exchange.status or None,
        "duration_s": round(exchange.ended_at - exchange.started_at, 6),
        "ttfb_s": round(exchange.first_at - exchange.started_at, 6) if exchange.first_at else None,
        "request_bytes": exchange.bytes_in,
        "response_bytes": exchange.bytes_out,
        "completed": completed,
        "client_disconnected": exchange.ended_by == "client",
        "error_type": exchange.error or None,
        "idempotency_key_present": exchange.idempotency_key,
        "traffic": route.traffic if route else None,
    }
