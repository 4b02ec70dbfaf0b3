import json
import re
from pathlib import Path

import pytest
import trio
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from omni_proxy.admin_api.routes import metrics_routes
from omni_proxy.admin_api.serializers.metrics_text import OPENMETRICS_TYPE, prefers_openmetrics
from omni_proxy.config.schema import AdminConfig, RoutingConfig
from omni_proxy.dataplane.exchange.request_trace import RequestTrace
from omni_proxy.routing.policies import build_policy
from omni_proxy.telemetry.line_log import LineLog
from omni_proxy.telemetry.metrics import RoutePhases, RouteSeries
from omni_proxy.telemetry.prometheus import CELLS_AT_ONCE, PART, gauges, otel_families
from tests.admin_api.api_fixture import NOW, SCOPE, A, B, build_api, entry
from tests.routing.policies.chats import chat
from tests.telemetry.ends import ended, refused
from tests.telemetry.lint import names, problems

ROOT = Path(__file__).parents[3]
GRAFANA = json.loads((ROOT / "contrib/grafana/omni-proxy.json").read_text())
ALERTS = (ROOT / "contrib/prometheus/alerts.yml").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()


@pytest.fixture
def busy():
    """An API in which each event that is counted has happened once."""
    api = build_api(
        entry(A, model="m", ranks=2), entry(B), routing=RoutingConfig(sticky_sessions=True)
    )
    api.healthy(A, B)
    api.data_plane.sessions = {"one": A, "two": A}
    a, b = api.worker(A), api.worker(B)
    a.dp_ranks[1].in_flight = 1
    a.dp_ranks[1].add_counts("generation", routed=4, succeeded=3, failed=1)
    count = api.instruments.metrics.record
    usage = b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'
    count(ended(a, model="m", last_chunk=usage, queued_secs=0.1, connect_secs=0.01), a)
    api.instruments.metrics.count_cached(a, 9, 4)
    count(ended(b, model="x", attempts=2, failed_attempts=[(a, "503")]), b)
    count(refused(model="y"), None)
    count(ended(route=None, requirements=None), None)
    for _ in range(api.fleet.thresholds.fall):
        api.fleet.observe_request_failure(b, status=None, error="gone", at=NOW)
    api.fleet.cordon(a, "updating")
    api.fleet.set_version(a, 'odd "label" \\ \u2028', 3)
    api.data_plane.policy = build_policy(
        RoutingConfig(policy="cache_aware", sticky_sessions=True), lambda _: 0, 0
    )
    for _ in range(3):
        api.data_plane.policy.pick([a], chat("a prompt"))
    api.config_store.reloads["refused", "SIGHUP"] += 1
    api.config_store.last_reload = {"outcome": "refused", "at": NOW.isoformat()}
    api.operations.history.ended["/update_weights_from_disk", False] += 1
    api.operations.history.spent_secs["/update_weights_from_disk"] = 2.5
    api.instruments.logs["access_log"] = LineLog()
    counts = {"connections": 3, "restarts": 1}
    api.data_plane.process_rows = [
        {"process": 0, "state": "serving", "in_flight": 2, **counts},
        {"process": 1, "state": "starting", "in_flight": 0, **counts},
    ]
    return api


async def scrape(api):
    response = await api.client().get("/metrics")
    assert response.status_code == 200
    assert response.headers["Content-Type"] == metrics_routes.CONTENT_TYPE
    return (await response.get_data()).decode()


async def values(api, name):
    """The samples with that name, by the values of their labels; the labels are sorted by name."""
    text = await scrape(api)
    return {
        tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def test_the_exposition_passes_the_lint(busy, api):
    assert problems(await scrape(busy)) == []
    assert problems(await scrape(api)) == []


def test_the_lint_finds_each_problem():
    bad = (
        "# TYPE a_ms counter\na_ms 1\n# HELP b_gauge x\n# TYPE b_gauge gauge\n"
        'b_gauge{client="1"} 1\nb_gauge{client="1"} 1\n'
    )
    found = "\n".join(problems(bad))
    for problem in ("no HELP", "base unit", "part of its name", "unknown labels", "twice"):
        assert problem in found


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("accept", "preferred"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ('application/openmetrics-text; version="1.0.0"; charset=utf-8', True),
        ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;q=0.5", True),
        ("text/plain, application/openmetrics-text; q=0.9", False),
        ("application/openmetrics-text; q=0", False),
        ("application/openmetrics-text; version=2.0.0", False),
        ("application/openmetrics-text; q=x, */*", False),
        ("*/*", False),
        ("", False),
        (",;,=;q", False),
    ],
)
def test_openmetrics_is_served_to_scrapers_that_prefer_it(accept, preferred):
    assert prefers_openmetrics(accept) is preferred


async def scrape_openmetrics(api):
    response = await api.client().get("/metrics", headers={"Accept": PROMETHEUS})
    assert response.status_code == 200
    assert response.headers["Content-Type"] == OPENMETRICS_TYPE
    assert response.headers["Vary"] == "accept"
    return (await response.get_data()).decode()


async def test_openmetrics_has_the_same_samples_plus_exemplars_with_trace_ids(busy):
    worker = busy.worker(A)
    meters = busy.instruments.metrics
    meters.note_trace(ended(worker, trace=RequestTrace(TRACE)), worker)
    text = await scrape_openmetrics(busy)
    assert text.endswith("\n# EOF\n")
    assert text.count("# EOF") == 1
    families = list(openmetrics_families(text))  # raises if the text is not valid OpenMetrics
    exemplars = {
        (family.name, sample.labels["le"]): sample.exemplar
        for family in families
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert set(exemplars) == {
        ("omni_proxy_request_duration_seconds", "1.28"),
        ("omni_proxy_time_to_first_chunk_seconds", "0.25"),
        ("gen_ai_client_operation_duration_seconds", "1.28"),
        ("gen_ai_client_operation_time_to_first_chunk_seconds", "0.25"),
    }
    assert {exemplar.labels["trace_id"] for exemplar in exemplars.values()} == {TRACE.decode()}
    plain = await scrape(busy)
    assert TRACE.decode() not in plain
    samples = [
        {
            (sample.name, *sorted(sample.labels.items()))
            for family in parsed
            for sample in family.samples
        }
        for parsed in (families, text_string_to_metric_families(plain))
    ]
    assert samples[0] == samples[1]


async def test_requests_are_counted_by_route_model_worker_status_and_end(busy):
    route = "/v1/chat/completions"
    assert await values(busy, "omni_proxy_requests_total") == {
        ("completed", "m", route, "2xx", A): 1,
        ("completed", "other", route, "2xx", B): 1,
        ("refused", "other", route, "5xx", ""): 1,
        ("completed", "", "front", "2xx", ""): 1,
    }


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("omni_proxy_failed_attempts_total", {("503", A): 1}),
        ("omni_proxy_failed_tries_total", {("503", A): 1}),  # the old name, for one release
        ("omni_proxy_retries_total", {(): 1}),
        ("omni_proxy_tokens_total", {("m", "input", A): 3, ("m", "output", A): 4}),
        ("omni_proxy_worker_ejections_total", {(A,): 0, (B,): 1}),
        ("omni_proxy_worker_health", {("healthy", A): 1, ("unhealthy", B): 1}),
        ("omni_proxy_worker_held", {("updating", A): 1}),
        ("omni_proxy_worker_weight_epoch", {(A,): 3, (B,): 0}),
        ("omni_proxy_worker_disabled", {}),
        ("omni_proxy_worker_half_open", {}),
        ("omni_proxy_worker_half_open_requests_total", {(A,): 0, (B,): 0}),
        ("omni_proxy_worker_trials_total", {(A,): 0, (B,): 0}),  # the old name
        ("omni_proxy_config_last_reload_successful", {(): 0}),
        ("omni_proxy_config_last_reload_timestamp_seconds", {(): NOW.timestamp()}),
        ("omni_proxy_config_reloads_total", {("refused", "SIGHUP"): 1}),
        (
            "omni_proxy_weight_operations_total",
            {("/update_weights_from_disk", "failed"): 1},
        ),
        ("omni_proxy_policy_picks_total", {("smallest_tree",): 1, ("matched",): 2}),
        ("omni_proxy_queue_seconds_count", {("/v1/chat/completions",): 1}),
    ],
)
async def test_each_counted_event_is_reported(busy, name, samples):
    assert await values(busy, name) == samples


async def test_opentelemetry_metrics_are_the_sums_over_all_workers(busy):
    name = "gen_ai_client_operation_{}_seconds_{}"
    by_model = {("chat", ""): 1, ("chat", "m"): 1}
    for kind, own_name in (
        ("duration", "request_duration"), ("time_to_first_chunk", "time_to_first_chunk"),
    ):  # fmt: skip
        assert await values(busy, name.format(kind, "count")) == by_model
        totals = await values(busy, name.format(kind, "sum"))
        by_worker = await values(busy, f"omni_proxy_{own_name}_seconds_sum")
        of_workers = [secs for (_, worker), secs in by_worker.items() if worker]
        assert sum(totals.values()) == pytest.approx(sum(of_workers))


def test_the_sums_of_a_large_fleet_are_made_in_parts():
    cell = RouteSeries(RoutePhases())
    cell.total.observe(0.5)
    worker = build_api(entry(A, model="m")).worker(A)
    parts = list(otel_families([("/generate", worker, cell)] * (3 * CELLS_AT_ONCE + 1)))
    assert len(parts) == 3 * 4
    (count,) = (
        sample
        for family in text_string_to_metric_families(
            b"".join(metrics_routes.render_in_slices(parts)).decode()
        )
        for sample in family.samples
        if sample.name == "gen_ai_client_operation_duration_seconds_count"
    )
    assert count.value == 3 * CELLS_AT_ONCE + 1
    assert count.labels == {
        "gen_ai_operation_name": "generate_content", "gen_ai_request_model": "m",
    }  # fmt: skip


async def test_the_policy_inside_sticky_sessions_has_its_metrics(busy):
    assert (await values(busy, "omni_proxy_prefix_tree_limit_bytes"))[()] > 0
    results = ("begun", "kept", "moved", "rebalanced")
    assert await values(busy, "omni_proxy_sticky_picks_total") == {
        (result,): 0 for result in results
    }


async def test_sessions_are_reported_by_worker_while_they_are_sticky(busy, api):
    assert await values(busy, "omni_proxy_worker_sessions") == {(A,): 2, (B,): 0}
    assert await values(api, "omni_proxy_worker_sessions") == {}


async def test_open_metrics_needs_no_key():
    api = build_api(entry(A), admin=AdminConfig(api_key="k", open_metrics=True))
    assert problems(await scrape(api)) == []
    assert (await api.client().get("/feed")).status_code == 401


def test_a_family_written_in_slices_has_the_same_text():
    family = GaugeMetricFamily("many", "with\nlines", labels=["n"])
    for number in range(3 * metrics_routes.SLICE + 1):
        family.add_metric([f"{number}"], number)

    class Whole(Collector):
        def collect(self):
            yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Whole())
    parts = list(metrics_routes.render_in_slices([family]))
    assert len(parts) == 4
    assert b"".join(parts) == generate_latest(registry)


def test_a_metric_family_in_parts_is_merged():
    samples = [((f"{number}",), number) for number in range(3 * PART)]
    parts = list(gauges("many", "a count", ("worker",), samples))
    assert len(parts) == 4
    text = b"".join(metrics_routes.render_in_slices(parts)).decode()
    assert text.count("# HELP") == text.count("# TYPE") == 1
    (family,) = text_string_to_metric_families(text)
    assert [sample.value for sample in family.samples] == list(range(3 * PART))


async def test_concurrent_scrapes_share_one_text(api, monkeypatch):
    collections = []
    families = metrics_routes.of_program
    monkeypatch.setattr(
        metrics_routes, "of_program", lambda *args: collections.append(1) or families(*args)
    )
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(scrape, api)
    assert len(collections) <= 2  # one for the first scrape, and one that the other four share


async def test_the_number_of_concurrent_scrapes_is_bounded(monkeypatch):
    monkeypatch.setattr(metrics_routes, "SCRAPES", 0)
    refused = await build_api().client().get("/metrics")
    assert refused.status_code == 503
    assert (await refused.get_json())["error"]["code"] == "too_many_scrapes"
    monkeypatch.setattr(metrics_routes, "SCRAPES", 1)
    api = build_api()
    for _ in range(3):
        await scrape(api)


async def test_a_scraper_that_never_reads_is_disconnected(autojump_clock, api):
    messages = [{"type": "http.request", "body": b""}]
    ended = trio.Event()

    async def receive():
        if not messages:
            await trio.sleep_forever()
        return messages.pop()

    async def send(message):
        if message.get("body"):
            await trio.sleep_forever()

    async def scraper():
        await api.app({**SCOPE, "path": "/metrics", "raw_path": b"/metrics"}, receive, send)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scraper)
        with trio.fail_after(2 * metrics_routes.SEND_SECS):
            await ended.wait()


def metrics_in(expression):
    """The names of the metrics in a PromQL expression."""
    found = re.findall(r"\b((?:omni_proxy|process)_[a-z_]+)\b", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


async def test_the_grafana_dashboard_uses_existing_metrics_only(busy):
    exported = names(await scrape(busy))
    panels = [panel for panel in GRAFANA["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    for panel in panels:
        for target in panel["targets"]:
            used = metrics_in(target["expr"])
            assert used, panel["title"]
            assert used <= exported, panel["title"]


async def test_the_alert_rules_use_existing_metrics_only(busy):
    exported = names(await scrape(busy))
    rules = re.findall(r"- alert: (\w+)\n +expr: (.+)\n", ALERTS)
    assert len(rules) == ALERTS.count("expr:") > 5
    for name, expression in rules:
        assert metrics_in(expression), name
        assert metrics_in(expression) <= exported, name


@pytest.mark.parametrize("topic", ["workers_paused", "paused_timestamp", "loop_stalls"])
def test_pauses_and_stalls_are_in_the_grafana_dashboard_and_alerts(topic):
    assert topic in json.dumps(GRAFANA)
    assert topic in ALERTS


async def test_the_guide_lists_exactly_the_exported_metrics(busy):
    exported = names(await scrape(busy))
    listed = set(re.findall(r"^\| `((?:omni_proxy|process)_[a-z_]+)", OPERATIONS, re.MULTILINE))
    assert {name for name in exported if name.startswith("omni_proxy")} == {
        name for name in listed if name.startswith("omni_proxy")
    }
    assert listed <= exported


def outcomes_in(pattern):
    """The outcomes that the data plane's code gives its exchanges and connections."""
    texts = [path.read_text() for path in sorted((ROOT / "omni_proxy/dataplane").rglob("*.py"))]
    return {word for text in texts for found in re.findall(pattern, text) for word in found if word}


def test_the_guide_lists_exactly_the_end_states():
    ends = outcomes_in(r'\bend\(\s*"(\w+)"(?: if [^"]* else "(\w+)")?')
    ends |= outcomes_in(r'\b(?:ended|outcome) = "(\w+)" if .* else "(\w+)"')
    ends |= outcomes_in(r'outcome or "(cut_by_proxy)"()')
    assert len(ends) == 9
    section = OPERATIONS.split("## End states")[1].split("## Timeouts")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == ends


def test_every_phase_is_in_the_guide():
    phases = outcomes_in(r'set_timeout\("(\w+)"()') | outcomes_in(r'phase(?:, [\w.]+)? = "(\w+)"()')
    assert {"queue", "backoff", "relay"} <= phases
    assert {phase for phase in phases if f"`{phase}`" not in OPERATIONS} == set()


def test_every_log_line_of_the_guide_is_written_by_the_program():
    code = "\n".join(path.read_text() for path in (ROOT / "omni_proxy").rglob("*.py"))
    section = OPERATIONS.split("## Log lines")[1].split("## Taking")[0]
    lines = [
        line
        for row in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
        for line in re.findall(r"`([^`]+)`", row)
    ]
    assert len(lines) > 12
    for line in lines:
        for part in line.split("…"):
            assert part.strip() in code, line


async def test_each_data_plane_process_has_its_series_also_under_the_old_names(busy):
    text = await scrape(busy)
    assert 'omni_proxy_dataplane_process_up{process="0"} 1.0' in text
    assert 'omni_proxy_dataplane_process_up{process="1"} 0.0' in text
    assert 'omni_proxy_dataplane_process_requests_in_flight{process="0"} 2.0' in text
    assert 'omni_proxy_dataplane_process_restarts_total{process="1"} 1.0' in text
    assert 'omni_proxy_door_up{door="0"} 1.0' in text
    assert 'omni_proxy_door_up{door="1"} 0.0' in text
    assert 'omni_proxy_door_requests_in_flight{door="0"} 2.0' in text
    assert 'omni_proxy_door_restarts_total{door="1"} 1.0' in text


async def test_each_data_parallel_rank_has_its_own_series(busy):
    text = (await (await busy.client().get("/metrics")).get_data()).decode()
    series = {line for line in text.splitlines() if line.startswith("omni_proxy_worker_rank_")}
    rows = [
        ("in_flight", "0", "", 0), ("in_flight", "1", "", 1),
        ("attempts_total", "0", 'result="succeeded",', 0),
        ("attempts_total", "0", 'result="failed",', 0),
        ("attempts_total", "1", 'result="succeeded",', 3),
        ("attempts_total", "1", 'result="failed",', 1),
    ]  # fmt: skip
    assert series == {
        f'omni_proxy_worker_rank_{name}{{rank="{rank}",{result}worker="{A}"}} {count}.0'
        for name, rank, result, count in rows
    }


async def test_a_fleet_without_ranks_has_no_rank_series():
    text = (await (await build_api(entry(A)).client().get("/metrics")).get_data()).decode()
    assert "omni_proxy_worker_rank" not in text


async def test_the_policies_of_the_pools_have_their_metrics(busy):
    sticky = {"kept": 4, "begun": 1, "moved": 0, "rebalanced": 0, "sessions": 1}
    busy.data_plane.pools_reported = {
        "prefill": {"name": "cache_aware", "picks": {"matched": 3}, "matched_ratio": 0.5},
        "decode": {"name": "least_request", "sticky": sticky},
    }
    assert await values(busy, "omni_proxy_pool_policy_info") == {
        ("cache_aware", "prefill"): 1, ("least_request", "decode"): 1,
    }  # fmt: skip
    picks = await values(busy, "omni_proxy_pool_policy_picks_total")
    assert picks == {("matched", "prefill"): 3}
    kept = await values(busy, "omni_proxy_pool_sticky_picks_total")
    assert kept["decode", "kept"] == 4
    ratios = await values(busy, "omni_proxy_pool_prefix_match_ratio")
    assert ratios == {("prefill",): 0.5, ("decode",): 0}
