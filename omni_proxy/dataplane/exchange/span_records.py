"""The spans of a request that has ended, as one record for the exporter.

One server span; one client span for each attempt at a worker, of both legs if there are two; one
internal span for each wait in the queue. Invariant: of a body, attributes contain only the model's
name and token counts; of headers, nothing. Names follow the OpenTelemetry semantic conventions for
HTTP and for generative AI.
"""

from __future__ import annotations

import time
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.request_trace import AttemptSpan, RequestTrace, new_span_id
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.routing.inspect.response_usage import tokens_in

Kind = Literal["server", "client", "internal"]
Attribute = str | int | float | bool
_OPERATIONS: Final = {  # gen_ai.operation.name, by the end of the path
    "/chat/completions": "chat",
    "/messages": "chat",
    "/responses": "chat",
    "/completions": "text_completion",
    "/generate": "text_completion",
    "/embeddings": "embeddings",
}
_encode = msgspec.json.encode


class SpanRecord(msgspec.Struct, gc=False, omit_defaults=True):
    """Ids in hexadecimal digits, times in Unix nanoseconds. `error`: the reason if the span's
    status is ERROR, else ""."""

    trace_id: str
    span_id: str
    name: str
    kind: Kind
    started_ns: int
    ended_ns: int
    parent_id: str = ""
    attributes: dict[str, Attribute] = {}
    error: str = ""


def spans_of(exchange: Exchange, trace: RequestTrace, offset_ns: int) -> list[SpanRecord]:
    """All spans, the server span first. `offset_ns`: Unix time minus the event loop's time."""
    trace_id, server_id = trace.trace_id.decode(), trace.span_id.decode()

    def ns(secs: float) -> int:
        return int(secs * 1e9) + offset_ns

    ended = exchange.ended_at
    route = exchange.route
    path = exchange.target.partition("?")[0]
    failed = exchange.status >= 500 or (
        exchange.outcome != "completed" and exchange.ended_by != "client"
    )
    spans = [
        SpanRecord(
            trace_id, server_id, f"{exchange.method} {route.path if route else path}", "server",
            ns(exchange.started_at), ns(ended),
            trace.parent_id.decode(), _server_attributes(exchange, path),
            (exchange.error or str(exchange.status)) if failed else "",
        )
    ]  # fmt: skip
    for started, stopped in trace.waits:
        spans.append(
            SpanRecord(
                trace_id, _span_id(), "queue", "internal", ns(started), ns(stopped), server_id
            )
        )
    for number, attempt in enumerate(trace.attempts):
        attributes, error = _attempt_attributes(exchange, attempt, trace.attempts[:number])
        spans.append(
            SpanRecord(
                trace_id, attempt.span_id.decode(), _attempt_name(exchange, attempt), "client",
                ns(attempt.started_at), ns(_end_of(exchange, attempt)), server_id, attributes,
                error,
            )
        )  # fmt: skip
    return spans


def encode_spans(exchange: Exchange, trace: RequestTrace, now: float) -> bytes:
    """`now`: the event loop's time."""
    return _encode(spans_of(exchange, trace, time.time_ns() - int(now * 1e9)))


def _span_id() -> str:
    return new_span_id().decode()


def _server_attributes(exchange: Exchange, path: str) -> dict[str, Attribute]:
    need, route = exchange.requirements, exchange.route
    address, _, port = exchange.client.rpartition(":")
    attributes: dict[str, Attribute] = {
        "http.request.method": exchange.method,
        "url.path": path,
        "client.address": address.strip("[]"),
        "http.request.body.size": exchange.bytes_in,
        "http.response.body.size": exchange.bytes_out,
        "omni_proxy.request_id": exchange.request_id.decode("latin-1"),
        "omni_proxy.policy": exchange.policy,
        "omni_proxy.outcome": exchange.outcome or "cut_by_proxy",
    }
    if port.isdecimal():
        attributes["client.port"] = int(port)
    if route is not None:
        attributes["http.route"] = route.path
        operation = next((name for end, name in _OPERATIONS.items() if path.endswith(end)), "")
        if operation:
            attributes["gen_ai.operation.name"] = operation
    if exchange.status:
        attributes["http.response.status_code"] = exchange.status
    if exchange.status >= 500 or exchange.error:
        attributes["error.type"] = exchange.error or str(exchange.status)
    if need is not None and need.asked_model:
        attributes["gen_ai.request.model"] = need.asked_model
    if exchange.first_at:
        attributes["omni_proxy.first_byte_secs"] = round(exchange.first_at - exchange.started_at, 6)
    if exchange.last_chunk:
        for kind, count in tokens_in(exchange.last_chunk).items():
            attributes[f"gen_ai.usage.{kind}_tokens"] = count
    return {name: value for name, value in attributes.items() if value != ""}


def _is_prefill(exchange: Exchange, attempt: AttemptSpan) -> bool:
    return exchange.legs is not None and attempt.target.role == "prefill"


def _attempt_name(exchange: Exchange, attempt: AttemptSpan) -> str:
    leg = ""
    if exchange.legs is not None:
        leg = "prefill " if attempt.target.role == "prefill" else "decode "
    return f"{leg}{exchange.method}"


def _end_of(exchange: Exchange, attempt: AttemptSpan) -> float:
    if attempt.ended_at:
        return attempt.ended_at
    legs = exchange.legs
    if legs is not None and legs.prefill is not None and _is_prefill(exchange, attempt):
        return legs.prefill.ended_at or exchange.ended_at
    return exchange.ended_at


def _attempt_attributes(
    exchange: Exchange, attempt: AttemptSpan, before: list[AttemptSpan]
) -> tuple[dict[str, Attribute], str]:
    """The attributes of an attempt's span, and its error, "" for none."""
    target = attempt.target
    place = urlsplit(target.worker.url)
    attributes: dict[str, Attribute] = {
        "http.request.method": exchange.method,
        "server.address": place.hostname or place.path,
        "omni_proxy.worker": target.worker.url,
    }
    if place.hostname:
        attributes["server.port"] = place.port or (443 if place.scheme == "https" else 80)
    if isinstance(target, DpRank):
        attributes["omni_proxy.dp_rank"] = target.index
    resent = sum(
        _is_prefill(exchange, earlier) == _is_prefill(exchange, attempt) for earlier in before
    )
    if resent:
        attributes["http.request.resend_count"] = resent
    error, status = attempt.error, 0
    if not attempt.ended_at:
        legs = exchange.legs
        of = exchange
        if legs is not None and legs.prefill is not None and _is_prefill(exchange, attempt):
            of = legs.prefill
        status = of.status if of.response_head_at else 0
        error = exchange.error if exchange.ended_by == "worker" and of is exchange else ""
    elif error.isdecimal():
        status = int(error)
    if status:
        attributes["http.response.status_code"] = status
        if status >= 400:
            error = error or str(status)
    if error:
        attributes["error.type"] = error
    return attributes, error
