"""Traces: each sampled request has spans, and workers get the trace context."""

import json

import pytest
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from omni_proxy.cli import main
from omni_proxy.dataplane.exchange.request_trace import parse_traceparent
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.promises.support.clients import post
from tests.promises.support.dataplane_fixture import Lines, dataplane_and_client
from tests.promises.support.disaggregated_engines import fleet_of
from tests.promises.support.fakes import answering, counted, fake_workers, resetting
from tests.promises.support.fleet_program import PATIENCE_SECS, program, toml, workers

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OBSERVED = '[observe]\notlp_endpoint = "http://127.0.0.1:1"\n'
UNSAMPLED = OBSERVED + "trace_sampling = 0\n"
USAGE = b'{"usage": {"prompt_tokens": 11, "completion_tokens": 7}}'
GOOD = answering(counted(USAGE, "content-type: application/json"))
CHAT = b'{"messages": [], "model": "m"}'


def parent(flags="01", span=SPAN):
    return f"traceparent: 00-{TRACE}-{span}-{flags}"


class Spans(Lines):
    def write(self, record):
        self.records.append(json.loads(record))

    def named(self, number, name):
        return [span for span in self.records[number] if span["name"] == name]


def record_spans(opened):
    opened.dataplane.recorders.spans = spans = Spans()
    return spans


def contexts_at(worker):
    """Returns the trace context of the latest request of each connection."""
    values = [dict(call.fields).get("traceparent", "") for call in worker.calls]
    return [parse_traceparent(value.encode()) for value in values]


async def ask(client, request):
    await client.send(request)
    return await client.answer()


# The last of four requests takes the fast path.
@pytest.mark.parametrize("repeats", [1, 4], ids=["first", "repeated"])
async def test_a_request_has_a_span_and_its_attempt_another(repeats):
    async with dataplane_and_client(GOOD, config=OBSERVED) as (opened, client):
        spans = record_spans(opened)
        opened.dataplane.recorders.meters = Metrics(
            opened.dataplane.fleet, RecentWindow(), lambda: 0.0
        )
        for _ in range(repeats):
            assert (await ask(client, post(CHAT))).status == 200
        (context,) = contexts_at(opened.workers[0])
        assert len(spans.records) == repeats
        request, attempt = spans.records[-1]
        assert (request["name"], request["kind"]) == ("POST /v1/chat/completions", "server")
        assert "parent_id" not in request
        assert "error" not in request
        assert (attempt["kind"], attempt["parent_id"]) == ("client", request["span_id"])
        assert (context.trace_id.decode(), context.span_id.decode()) == (
            request["trace_id"],
            attempt["span_id"],
        )
        assert attempt["trace_id"] == request["trace_id"]
        assert request["started_ns"] <= attempt["started_ns"] <= attempt["ended_ns"]
        assert attempt["ended_ns"] <= request["ended_ns"]
        attributes = request["attributes"]
        assert attributes["gen_ai.operation.name"] == "chat"
        assert attributes["gen_ai.request.model"] == "m"
        assert attributes["gen_ai.usage.input_tokens"] == 11
        assert attributes["gen_ai.usage.output_tokens"] == 7
        assert attributes["http.response.status_code"] == 200
        host, _, port = opened.urls[0].removeprefix("http://").partition(":")
        assert attempt["attributes"]["server.address"] == host
        assert attempt["attributes"]["server.port"] == int(port)
        assert "http.request.resend_count" not in attempt["attributes"]
        assert opened.last["trace_id"] == request["trace_id"]
        # One exemplar per bucket, the latest; which buckets are used depends on timing.
        trace_ids = {
            exemplar.trace_id for *_, exemplar in opened.dataplane.recorders.meters.exemplars.rows()
        }
        assert request["trace_id"] in trace_ids
        assert len(trace_ids) <= repeats


async def test_a_clients_trace_is_continued_on_either_path():
    async with dataplane_and_client(GOOD, config=UNSAMPLED) as (opened, client):
        spans = record_spans(opened)
        for number in range(4):
            await ask(client, post(CHAT, parent(span=f"{number + 1:016x}")))
            (context,) = contexts_at(opened.workers[0])
            request, attempt = spans.records[-1]
            assert (request["trace_id"], request["parent_id"]) == (TRACE, f"{number + 1:016x}")
            assert (context.trace_id.decode(), context.span_id.decode()) == (
                TRACE,
                attempt["span_id"],
            )


@pytest.mark.parametrize("config", [OBSERVED, UNSAMPLED], ids=["sampled", "unsampled"])
@pytest.mark.parametrize(
    ("traceparent", "forwarded"), [("00-nonsense", ""), (None, ""), (parent()[13:], "a=b")]
)
async def test_a_tracestate_is_forwarded_only_with_its_own_trace(config, traceparent, forwarded):
    parent_fields = [] if traceparent is None else [f"traceparent: {traceparent}"]
    async with dataplane_and_client(GOOD, config=config) as (opened, client):
        record_spans(opened)
        for number in range(4):  # the last one takes the fast path
            state = f"tracestate: a=b{number}"
            await ask(client, post(CHAT, *parent_fields, state, "x-other: 1"))
            (call,) = opened.workers[0].calls
            fields = dict(call.fields)
            assert fields.get("tracestate", "") == (forwarded and f"{forwarded}{number}")
            assert fields["x-other"] == "1"
            assert parse_traceparent(fields["traceparent"].encode())


async def test_an_unsampled_request_has_no_span_and_the_worker_gets_the_flag():
    async with dataplane_and_client(GOOD, config=UNSAMPLED) as (opened, client):
        spans = record_spans(opened)
        for _ in range(4):
            await ask(client, post(CHAT))
            (context,) = contexts_at(opened.workers[0])
            assert context.sampled is False
        for _ in range(4):
            await ask(client, post(CHAT, parent("00")))
            (context,) = contexts_at(opened.workers[0])
            assert (context.trace_id.decode(), context.span_id.decode()) == (TRACE, SPAN)
            assert context.sampled is False
        assert spans.records == []
        assert "trace_id" not in opened.last


async def test_without_an_endpoint_trace_headers_are_unchanged():
    async with dataplane_and_client(GOOD) as (opened, client):
        await ask(client, post(CHAT, "traceparent: what it likes"))
        assert dict(opened.workers[0].calls[0].fields)["traceparent"] == "what it likes"
        await ask(client, post(CHAT))
        assert "traceparent" not in dict(opened.workers[0].calls[0].fields)


async def test_a_retry_has_a_span_and_the_failed_attempt_has_its_error():
    async with dataplane_and_client(resetting, GOOD, config=OBSERVED) as (opened, client):
        spans = record_spans(opened)
        assert (await ask(client, post(CHAT))).status == 200
        request, failed, good = spans.records[-1]
        assert "error" not in request
        assert failed["error"] == failed["attributes"]["error.type"] == "reset_before_response"
        assert "http.response.status_code" not in failed["attributes"]
        assert good["attributes"]["http.request.resend_count"] == 1
        assert good["attributes"]["http.response.status_code"] == 200
        contexts = [context for worker in opened.workers for context in contexts_at(worker)]
        assert [context.span_id.decode() for context in contexts] == [
            failed["span_id"],
            good["span_id"],
        ]


async def test_a_server_error_marks_the_request_span_and_a_client_error_does_not():
    bad = answering(counted(b"{}", status="500 Oops"))
    for script, status in ((bad, 500), (answering(counted(b"{}", status="404 No")), 404)):
        async with dataplane_and_client(script, config=OBSERVED) as (opened, client):
            spans = record_spans(opened)
            assert (await ask(client, post(CHAT))).status == status
            request, attempt = spans.records[-1]
            assert request.get("error") == ("500" if status == 500 else None)
            assert attempt["error"] == str(status)


async def test_only_a_request_that_waits_in_the_queue_has_a_queue_span():
    config = "[server]\nmax_inflight = 1\nqueue_size = 4\nqueue_timeout_secs = 60\n" + OBSERVED
    gate, arrived = trio.Event(), trio.Event()

    async def slow(call):
        arrived.set()
        await gate.wait()
        await call.send(counted(USAGE))

    async with dataplane_and_client(slow, config=config) as (opened, client):
        spans = record_spans(opened)
        await client.send(post(CHAT))
        await arrived.wait()
        async with opened.client() as second:
            await second.send(post(CHAT))
            with trio.fail_after(PATIENCE_SECS):
                while not opened.dataplane.services.queue.waiting:
                    await trio.sleep(0.01)
            gate.set()
            await client.answer()
            await second.answer()
        assert [len(spans.named(number, "queue")) for number in range(2)] == [0, 1]
        request, queue_span, attempt = spans.records[1]
        assert queue_span["parent_id"] == request["span_id"]
        assert queue_span["started_ns"] < queue_span["ended_ns"] <= attempt["started_ns"]


@pytest.mark.parametrize("connector", ["sglang", "nixl", "mooncake"])
async def test_both_legs_of_a_pair_have_spans_of_one_trace(connector):
    async with fleet_of(connector, config=OBSERVED) as (fleet, client):
        spans = record_spans(fleet.before)
        for _ in range(3):
            assert (await ask(client, post(CHAT))).status == 200
        request, *legs = spans.records[-1]
        names = {leg["name"]: leg for leg in legs}
        assert names.keys() == {"prefill POST", "decode POST"}
        for leg, engine in zip(("prefill POST", "decode POST"), fleet.engines, strict=True):
            assert names[leg]["parent_id"] == request["span_id"]
            assert names[leg]["attributes"]["omni_proxy.worker"] == engine.url
            assert names[leg]["attributes"]["http.response.status_code"] == 200


async def collected_spans(collector, is_complete):
    """Returns all exported spans with their resources, once `is_complete` is true."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            messages = [ExportTraceServiceRequest.FromString(b) for _, b in collector.requests]
            spans = [
                (resource.resource, span)
                for message in messages
                for resource in message.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
            if is_complete([span for _, span in spans]):
                return spans
            await trio.sleep(0.02)


async def test_two_processes_export_each_span_once_to_a_collector(tmp_path, capfd):
    async with workers("a") as fleet, fake_workers(answering(counted(b""))) as (collector,):
        file, route_log = tmp_path / "proxy.toml", tmp_path / "route.log"
        more = f'processes = 2\nroute_log = "{route_log}"\n'
        text = toml(fleet, more=more) + f'[observe]\notlp_endpoint = "{collector.url}"\n'
        file.write_text(text)
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            for _ in range(6):
                running.client.headers["connection"] = "close"
                assert (await running.ask()).status_code == 200
            await running.client.post("/continue_generation", json={})
            exported = await collected_spans(
                collector, lambda spans: sum(span.kind == 2 for span in spans) >= 6
            )
            requests = [span for _, span in exported if span.kind == 2]
            assert len({span.trace_id for span in requests}) == len(requests) == 6
            assert {line for line, _ in collector.requests} == {"POST /v1/traces HTTP/1.1"}
            resource = {field.key: field.value.string_value for field in exported[0][0].attributes}
            assert resource["service.name"] == "omni-proxy"
            operation = [span for _, span in exported if span.name.startswith("weights ")]
            assert [span.name for span in operation] == ["weights /continue_generation"]
            counts = (await running.client.get("/metrics")).text
            assert 'omni_proxy_spans_total{result="dropped"} 0.0' in counts
        trace_id = requests[0].trace_id.hex()
        arguments = ["trace", trace_id, "--config", str(file)]
        assert await trio.to_thread.run_sync(main, arguments) == 0
        output = capfd.readouterr().out
        assert f"trace_id                 {trace_id}" in output
        assert fleet[0].url in output


async def test_an_unreachable_collector_affects_no_request(tmp_path):
    async with workers("a") as fleet:
        file = tmp_path / "proxy.toml"
        file.write_text(toml(fleet) + OBSERVED)
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            for _ in range(3):
                assert (await running.ask()).status_code == 200
            assert await running.leave() == 0
