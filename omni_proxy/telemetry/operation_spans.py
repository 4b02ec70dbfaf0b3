"""The span of a weight operation that is over, as a line for the exporter.

Pure. Invariant: the trace is the caller's where it sent a `traceparent`, else the operation's own
id; nothing of a body is in it but the version that the operation ended with.
"""

from __future__ import annotations

import msgspec

from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.dataplane.tracing.span_records import Attribute, SpanRecord
from omni_proxy.dataplane.tracing.trace_context import parse_traceparent


def encode_operation_span(
    operation: Operation, response: AdminResponse, secs: float, ended_ns: int
) -> bytes | None:
    """`secs`: from its request to its end; `ended_ns`: since 1970. None where the caller's trace is
    not sampled."""
    parent = parse_traceparent(operation.trace_parent.encode("latin-1", "replace"))
    if parent is not None and not parent.sampled:
        return None
    rows = operation.progress()
    failed = [str(row["worker"]) for row in rows if row["progress"] != "done"]
    attributes: dict[str, Attribute] = {
        "omni_proxy.operation_id": operation.id,
        "omni_proxy.caller": operation.caller,
        "omni_proxy.workers": len(rows),
        "omni_proxy.workers_failed": ", ".join(failed),
        "http.response.status_code": response.status,
        "url.path": operation.route.path,
    }
    for name in ("weight_epoch", "weight_version"):
        value = response.body.get(name)
        if isinstance(value, str | int):
            attributes[f"omni_proxy.{name}"] = value
    message = response.body.get("message")
    span = SpanRecord(
        trace_id=parent.trace_id.decode() if parent is not None else operation.id,
        span_id=operation.id[:16],
        name=f"weights {operation.route.path}",
        kind="internal",
        started_ns=ended_ns - int(secs * 1e9),
        ended_ns=ended_ns,
        parent_id=parent.span_id.decode() if parent is not None else "",
        attributes={name: value for name, value in attributes.items() if value != ""},
        error="" if response.ok else str(message or response.status),
    )
    return msgspec.json.encode([span])
