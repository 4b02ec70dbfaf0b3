import msgspec
from opentelemetry.sdk.trace.export import SpanExportResult

from omni_proxy.dataplane.span_records import SpanRecord
from omni_proxy.telemetry.span_exporter import _Sender


class Collected:
    """In the place of the SDK's exporter."""

    def __init__(self):
        self.spans = []

    def export(self, spans):
        self.spans += spans
        return SpanExportResult.SUCCESS


def test_the_resource_of_all_spans_is_made_once():
    sender, collected = _Sender("http://127.0.0.1:9"), Collected()
    sender._exporter = collected
    span = SpanRecord("1" * 32, "2" * 16, "POST /v1/chat/completions", "server", 1, 2)
    record = msgspec.json.encode([span, span])
    assert [sender.send([record, record]) for _ in range(2)] == [(4, 0)] * 2
    assert len({id(each.resource) for each in collected.spans}) == 1
    assert collected.spans[0].resource.attributes["service.name"] == "omni-proxy"
