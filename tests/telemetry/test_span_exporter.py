import msgspec
from opentelemetry.sdk.trace.export import SpanExportResult

from omni_proxy.dataplane.exchange.span_records import SpanRecord
from omni_proxy.telemetry.span_exporter import SpanSender


class FakeExporter:
    """A stand-in for the SDK's exporter."""

    def __init__(self):
        self.spans = []

    def export(self, spans):
        self.spans += spans
        return SpanExportResult.SUCCESS


def test_all_spans_share_one_resource():
    exporter = FakeExporter()
    sender = SpanSender("http://127.0.0.1:9", exporter)
    span = SpanRecord("1" * 32, "2" * 16, "POST /v1/chat/completions", "server", 1, 2)
    record = msgspec.json.encode([span, span])
    assert [sender.send([record, record]) for _ in range(2)] == [(4, 0)] * 2
    assert len({id(span.resource) for span in exporter.spans}) == 1
    assert exporter.spans[0].resource.attributes["service.name"] == "omni-proxy"
