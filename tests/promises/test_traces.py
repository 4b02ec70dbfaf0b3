"""Traces: each request that is sampled has its spans, and the workers get the context."""

import json

import pytest
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from omni_proxy.cli import main
from omni_proxy.dataplane.request_trace import parse_traceparent
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.promises.clients import post
from tests.promises.dataplane_fixture import Lines, dataplane_before
from tests.promises.disaggregated_engines import fleet_of
from tests.promises.fakes import answering, counted, fake_workers, resetting
from tests.promises.fleet_program import PATIENCE_SECS, program, toml, workers

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


def traced(opened):
    opened.dataplane.recorders.spans = spans = Spans()
    return spans


def sent(worker):
    """The context of the newest request of each connection."""
    found = [dict(call.fields).get("traceparent", "") for call in worker.calls]
    return [parse_traceparent(value.encode()) for value in found]


async def answered(client, request):
    await client.send(request)
    return await client.answer()


@pytest.mark.parametrize("repeats", [1, 4], ids=["first", "repeated"])  # the last on the fast path
async def test_a_request_has_a_span_and_its_attempt_another(repeats):
    async with dataplane_before(GOOD, config=OBSERVED) as (opened, client):
        spans = traced(opened)
        opened.dataplane.recorders.meters = Metrics(
            opened.dataplane.fleet, RecentWindow(), lambda: 0.0
        )
        for _ in range(repeats):
            assert (await answered(client, post(CHAT))).status == 200
        (context,) = sent(opened.workers[0])
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
        about = request["attributes"]
        assert about["gen_ai.operation.name"] == "chat"
        assert about["gen_ai.request.model"] == "m"
        assert about["gen_ai.usage.input_tokens"] == 11
        assert about["gen_ai.usage.output_tokens"] == 7
        assert about["http.response.status_code"] == 200
        host, _, port = opened.urls[0].removeprefix("http://").partition(":")
        assert attempt["attributes"]["server.address"] == host
        assert attempt["attributes"]["server.port"] == int(port)
        assert "http.request.resend_count" not in attempt["attributes"]
        assert opened.last["trace_id"] == request["trace_id"]
        # Of each bucket the newest; how long a request takes is not given.
        noted = {each.trace_id for *_, each in opened.dataplane.recorders.meters.exemplars.rows()}
        assert request["trace_id"] in noted
        assert len(noted) <= repeats


async def test_a_clients_trace_is_continued_on_either_path():
    async with dataplane_before(GOOD, config=UNSAMPLED) as (opened, client):
        spans = traced(opened)
        for number in range(4):
            await answered(client, post(CHAT, parent(span=f"{number + 1:016x}")))
            (context,) = sent(opened.workers[0])
            request, attempt = spans.records[-1]
            assert (request["trace_id"], request["parent_id"]) == (TRACE, f"{number + 1:016x}")
            assert (context.trace_id.decode(), context.span_id.decode()) == (
                TRACE,
                attempt["span_id"],
            )


@pytest.mark.parametrize("config", [OBSERVED, UNSAMPLED], ids=["sampled", "unsampled"])
@pytest.mark.parametrize(
    ("traceparent", "kept"), [("00-nonsense", ""), (None, ""), (parent()[13:], "a=b")]
)
async def test_a_tracestate_goes_with_its_own_trace_only(config, traceparent, kept):
    given = [] if traceparent is None else [f"traceparent: {traceparent}"]
    async with dataplane_before(GOOD, config=config) as (opened, client):
        traced(opened)
        for number in range(4):  # the last on the fast path
            state = f"tracestate: a=b{number}"
            await answered(client, post(CHAT, *given, state, "x-other: 1"))
            (call,) = opened.workers[0].calls
            fields = dict(call.fields)
            assert fields.get("tracestate", "") == (kept and f"{kept}{number}")
            assert fields["x-other"] == "1"
            assert parse_traceparent(fields["traceparent"].encode())


async def test_a_request_that_is_not_sampled_leaves_no_span_and_the_worker_gets_the_flag():
    async with dataplane_before(GOOD, config=UNSAMPLED) as (opened, client):
        spans = traced(opened)
        for _ in range(4):
            await answered(client, post(CHAT))
            (context,) = sent(opened.workers[0])
            assert context.sampled is False
        for _ in range(4):
            await answered(client, post(CHAT, parent("00")))
            (context,) = sent(opened.workers[0])
            assert (context.trace_id.decode(), context.span_id.decode()) == (TRACE, SPAN)
            assert context.sampled is False
        assert spans.records == []
        assert "trace_id" not in opened.last


async def test_without_an_endpoint_headers_pass_as_they_came():
    async with dataplane_before(GOOD) as (opened, client):
        await answered(client, post(CHAT, "traceparent: what it likes"))
        assert dict(opened.workers[0].calls[0].fields)["traceparent"] == "what it likes"
        await answered(client, post(CHAT))
        assert "traceparent" not in dict(opened.workers[0].calls[0].fields)


async def test_a_retry_is_a_span_that_says_what_failed_before():
    async with dataplane_before(resetting, GOOD, config=OBSERVED) as (opened, client):
        spans = traced(opened)
        assert (await answered(client, post(CHAT))).status == 200
        request, failed, good = spans.records[-1]
        assert "error" not in request
        assert failed["error"] == failed["attributes"]["error.type"] == "reset_before_response"
        assert "http.response.status_code" not in failed["attributes"]
        assert good["attributes"]["http.request.resend_count"] == 1
        assert good["attributes"]["http.response.status_code"] == 200
        contexts = [each for worker in opened.workers for each in sent(worker)]
        assert [each.span_id.decode() for each in contexts] == [failed["span_id"], good["span_id"]]


async def test_a_response_of_500_and_above_is_an_error_and_one_below_is_none():
    bad = answering(counted(b"{}", status="500 Oops"))
    for script, status in ((bad, 500), (answering(counted(b"{}", status="404 No")), 404)):
        async with dataplane_before(script, config=OBSERVED) as (opened, client):
            spans = traced(opened)
            assert (await answered(client, post(CHAT))).status == status
            request, attempt = spans.records[-1]
            assert request.get("error") == ("500" if status == 500 else None)
            assert attempt["error"] == str(status)


async def test_a_wait_in_the_queue_is_a_span_and_only_then():
    config = "[server]\nmax_inflight = 1\nqueue_size = 4\nqueue_timeout_secs = 60\n" + OBSERVED
    gate, arrived = trio.Event(), trio.Event()

    async def slow(call):
        arrived.set()
        await gate.wait()
        await call.send(counted(USAGE))

    async with dataplane_before(slow, config=config) as (opened, client):
        spans = traced(opened)
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
        assert [len(each) for each in (spans.named(n, "queue") for n in range(2))] == [0, 1]
        request, waited, attempt = spans.records[1]
        assert waited["parent_id"] == request["span_id"]
        assert waited["started_ns"] < waited["ended_ns"] <= attempt["started_ns"]


@pytest.mark.parametrize("connector", ["sglang", "nixl", "mooncake"])
async def test_both_legs_of_a_pair_have_spans_of_one_trace(connector):
    async with fleet_of(connector, config=OBSERVED) as (fleet, client):
        spans = traced(fleet.before)
        for _ in range(3):
            assert (await answered(client, post(CHAT))).status == 200
        request, *legs = spans.records[-1]
        names = {leg["name"]: leg for leg in legs}
        assert names.keys() == {"prefill POST", "decode POST"}
        for leg, engine in zip(("prefill POST", "decode POST"), fleet.engines, strict=True):
            assert names[leg]["parent_id"] == request["span_id"]
            assert names[leg]["attributes"]["omni_proxy.worker"] == engine.url
            assert names[leg]["attributes"]["http.response.status_code"] == 200


async def collected(collector, holds):
    """All spans that came, once `holds` is true of them."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            messages = [ExportTraceServiceRequest.FromString(b) for _, b in collector.requests]
            found = [
                (resource.resource, span)
                for message in messages
                for resource in message.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
            if holds([span for _, span in found]):
                return found
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
            found = await collected(
                collector, lambda spans: sum(span.kind == 2 for span in spans) >= 6
            )
            requests = [span for _, span in found if span.kind == 2]
            assert len({span.trace_id for span in requests}) == len(requests) == 6
            assert {line for line, _ in collector.requests} == {"POST /v1/traces HTTP/1.1"}
            about = {each.key: each.value.string_value for each in found[0][0].attributes}
            assert about["service.name"] == "omni-proxy"
            operation = [span for _, span in found if span.name.startswith("weights ")]
            assert [span.name for span in operation] == ["weights /continue_generation"]
            counts = (await running.client.get("/metrics")).text
            assert 'omni_proxy_spans_total{result="dropped"} 0.0' in counts
        wanted = requests[0].trace_id.hex()
        arguments = ["trace", wanted, "--config", str(file)]
        assert await trio.to_thread.run_sync(main, arguments) == 0
        shown = capfd.readouterr().out
        assert f"trace_id                 {wanted}" in shown
        assert fleet[0].url in shown


async def test_a_collector_that_is_away_costs_spans_and_no_request(tmp_path):
    async with workers("a") as fleet:
        file = tmp_path / "proxy.toml"
        file.write_text(toml(fleet) + OBSERVED)
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            for _ in range(3):
                assert (await running.ask()).status_code == 200
            assert await running.leave() == 0
