"""Sends span records to an OpenTelemetry collector, by OTLP over HTTP.

Invariant: `write` neither waits nor raises; encoding and sending happen in a thread, with the
OpenTelemetry SDK, which is imported there at the first export. Spans that can't be sent in time are
dropped and counted: if the collector is unreachable, spans are lost, but no request fails. The
SDK's environment variables apply, such as OTEL_EXPORTER_OTLP_HEADERS and OTEL_RESOURCE_ATTRIBUTES.

`encode_operation_span` encodes a weight operation as a span record. Its trace is the one of the
caller's `traceparent`, else the operation's id. Of the response it has only status, version and
error.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from omni_proxy import __version__
from omni_proxy.admin_ops.operation import Operation
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.dataplane.exchange.request_trace import parse_traceparent
from omni_proxy.dataplane.exchange.span_records import Attribute, SpanRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter as SdkSpanExporter
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope


_log = logging.getLogger(__name__)

PATH: Final = "/v1/traces"
QUEUE_BYTES: Final = 8 * 1024 * 1024
BATCH: Final = 512  # requests
GATHER_SECS: Final = 1.0
SEND_SECS: Final = 10.0  # limit for one batch, with the SDK's retries
LAST_SEND_SECS: Final = 2.0
FAILURE_REPORT_SECS: Final = 60.0
_decode = msgspec.json.Decoder(list[SpanRecord]).decode


class SpanExporter:
    """`write` queues records, each with the spans of one request; `run` sends them to the endpoint,
    which may change at any time."""

    def __init__(self) -> None:
        self.exported = 0  # spans
        self.failed = 0  # spans that the collector did not accept
        self.dropped = 0  # records that did not fit into the queue
        self._endpoint = ""
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._filled = trio.Event()
        self._full = trio.Event()
        self._failure_reported_at = float("-inf")
        self._sender: SpanSender | None = None

    def retarget(self, endpoint: str) -> None:
        """Set the base URL of the collector; "" disables the export."""
        self._endpoint = endpoint
        if not endpoint:
            self._take(len(self._queue))

    def write(self, record: bytes) -> None:
        """Queue the spans of one request, as encoded by `encode_spans`."""
        if not self._endpoint:
            return
        if self._queued_bytes + len(record) > QUEUE_BYTES:
            self.dropped += 1
            return
        self._queue.append(record)
        self._queued_bytes += len(record)
        self._filled.set()
        if len(self._queue) >= BATCH:
            self._full.set()

    def status(self) -> dict[str, object]:
        return {
            "endpoint": self._endpoint,
            "exported": self.exported,
            "failed": self.failed,
            "dropped": self.dropped,
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send until cancelled, then try to send the rest of the queue."""
        task_status.started()
        try:
            while True:
                await self._filled.wait()
                with trio.move_on_after(GATHER_SECS):
                    await self._full.wait()
                await self._send_batch()
        finally:
            with trio.move_on_after(LAST_SEND_SECS, shield=True):
                while self._queue:
                    await self._send_batch()

    def _take(self, count: int) -> list[bytes]:
        records = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        self._queued_bytes -= sum(map(len, records))
        if not self._queue:
            self._filled = trio.Event()
        if len(self._queue) < BATCH:
            self._full = trio.Event()
        return records

    async def _send_batch(self) -> None:
        records, endpoint = self._take(BATCH), self._endpoint
        if not records:
            await trio.lowlevel.checkpoint()
            return
        sender = self._sender
        if sender is None or sender.endpoint != endpoint:
            sender = self._sender = SpanSender(endpoint)
        sent, failed = await trio.to_thread.run_sync(sender.send, records, abandon_on_cancel=True)
        self.exported += sent
        self.failed += failed
        now = trio.current_time()
        if failed and now - self._failure_reported_at >= FAILURE_REPORT_SECS:
            self._failure_reported_at = now
            _log.warning("spans_not_sent endpoint=%s failed=%d", endpoint, self.failed)


class SpanSender:
    """Blocking: call it in a thread, one call at a time. `exporter`: by default one of the SDK,
    created by the first call."""

    def __init__(self, endpoint: str, exporter: SdkSpanExporter | None = None) -> None:
        self.endpoint = endpoint
        self._exporter = exporter
        # Shared by all spans: creating a resource starts a thread for each of its detectors.
        self._origin: tuple[Resource, InstrumentationScope] | None = None

    def send(self, records: Sequence[bytes]) -> tuple[int, int]:
        """Returns how many spans were sent, and how many failed."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        if self._origin is None:
            about = {SERVICE_NAME: "omni-proxy", SERVICE_VERSION: __version__}
            scope = InstrumentationScope("omni_proxy", __version__)
            self._origin = Resource.create(about), scope
        if self._exporter is None:
            # The SDK would log each failed batch; this module logs at most once a minute.
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
            self._exporter = OTLPSpanExporter(endpoint=self.endpoint + PATH, timeout=SEND_SECS)
        origin = self._origin
        spans = [_sdk_span(span, *origin) for record in records for span in _decode(record)]
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            return len(spans), 0
        return 0, len(spans)


def _sdk_span(record: SpanRecord, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    def context(span_id: str, *, remote: bool) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(record.trace_id, 16), int(span_id, 16), remote, flags)

    is_server = record.kind == "server"
    return ReadableSpan(
        record.name,
        context=context(record.span_id, remote=False),
        parent=context(record.parent_id, remote=is_server) if record.parent_id else None,
        resource=resource,
        attributes=record.attributes,
        kind=SpanKind[record.kind.upper()],
        status=Status(StatusCode.ERROR, record.error) if record.error else Status(StatusCode.UNSET),
        start_time=record.started_ns,
        end_time=record.ended_ns,
        instrumentation_scope=scope,
    )


def encode_operation_span(
    operation: Operation, response: AdminResponse, secs: float, ended_ns: int
) -> bytes | None:
    """`secs`: from its request to its end. `ended_ns`: Unix time in nanoseconds. None if the
    caller's trace is not sampled."""
    parent = parse_traceparent(operation.trace_parent.encode("latin-1", "replace"))
    if parent is not None and not parent.sampled:
        return None
    attributes: dict[str, Attribute] = {
        "omni_proxy.operation_id": operation.id,
        "omni_proxy.caller": operation.caller,
        "omni_proxy.workers": len(operation.targets),
        "omni_proxy.workers_failed": ", ".join(operation.failed_targets),
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
