import json
import re
import time
from contextlib import asynccontextmanager
from html.parser import HTMLParser

import pytest
import trio
from msgspec import structs

from omni_proxy.admin_api.routes import dashboard_routes
from omni_proxy.admin_api.routes.dashboard_routes import (
    content_security_policy,
    dashboard_page,
)
from omni_proxy.admin_api.serializers.worker_records import operator_state, reasons
from omni_proxy.telemetry.history import POINTS, SERIES
from tests.admin_api.api_fixture import NOW, SCOPE, A, B, build_api, entry
from tests.telemetry.ends import ended

PAGE = dashboard_page()


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.fixture
def tags():
    parser = Tags()
    parser.feed(PAGE)
    return parser.found


def rules(response):
    policy = response.headers["Content-Security-Policy"]
    return dict(rule.strip().split(" ", 1) for rule in policy.split(";"))


async def test_the_page_is_served_whole(api):
    response = await api.client().get("/dashboard")
    assert response.status_code == 200
    assert response.content_type == "text/html; charset=utf-8"
    assert await response.get_data(as_text=True) == PAGE


async def test_the_page_needs_no_key_and_contains_no_data():
    api = build_api(entry(A, model="secret-model"), key="hunter2")
    response = await api.client().get("/dashboard")
    assert (response.status_code, await response.get_data(as_text=True)) == (200, PAGE)


async def test_the_csp_allows_inline_code_and_this_api_only(api):
    policy = rules(await api.client().get("/dashboard"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[kind])
    assert "unsafe" not in str(policy)
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"


def test_another_script_has_another_hash():
    first, second = (
        content_security_policy(f"<style>a</style><script>{text}</script>") for text in ("1", "2")
    )
    assert first != second


async def test_the_page_forbids_framing_sniffing_and_caching(api):
    headers = (await api.client().get("/dashboard")).headers
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-cache"


async def test_an_unchanged_page_is_not_sent_again(api):
    client = api.client()
    tag = (await client.get("/dashboard")).headers["ETag"]
    again = await client.get("/dashboard", headers={"If-None-Match": tag})
    assert (again.status_code, await again.get_data()) == (304, b"")
    assert (await client.get("/dashboard", headers={"If-None-Match": '"x"'})).status_code == 200


def test_the_page_has_no_url_of_another_host():
    namespaces = {"http://www.w3.org/2000/svg"}
    examples = {"http://10.0.0.7:8000", "http://${typed}"}  # a placeholder, and the user's input
    urls = set(re.findall(r"https?://[^\s\"'`)<>]+", PAGE))
    assert urls - namespaces - examples <= {"https?:"}
    assert "@import" not in PAGE
    assert "url(" not in PAGE


def test_the_page_loads_nothing_from_elsewhere(tags):
    for tag, attributes in tags:
        assert not {"src", "srcset", "action", "ping"} & attributes.keys(), tag
        target = attributes.get("href", "#")
        assert target.startswith(("#", "data:")), target


def test_the_page_has_no_inline_styles_or_event_handlers(tags):
    for tag, attributes in tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
    assert len([tag for tag, _ in tags if tag in ("script", "style")]) == 2


def test_no_script_writes_markup():
    sinks = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(")
    assert [sink for sink in sinks if sink in PAGE] == []


def test_the_key_is_stored_for_this_tab_only():
    assert "sessionStorage" in PAGE
    assert [name for name in ("localStorage", "document.cookie", "indexedDB") if name in PAGE] == []


def test_every_input_field_has_a_label(tags):
    labelled = set(re.findall(r'<label[^>]*>(?:(?!</label>).)*?id="([\w-]+)"', PAGE))
    for tag, attributes in tags:
        if tag in ("input", "select", "textarea") and attributes["id"] not in labelled:
            assert attributes.get("aria-label"), attributes


@pytest.mark.parametrize(
    ("accept", "status"),
    [("text/html,application/xhtml+xml,*/*;q=0.8", 302), ("*/*", 404), ("application/json", 404)],
)
async def test_the_root_redirects_a_browser_to_the_dashboard_and_is_a_404_to_programs(
    api, accept, status
):
    response = await api.client().get("/", headers={"Accept": accept})
    assert response.status_code == status
    if status == 302:
        assert response.headers["Location"].endswith("dashboard")
    else:
        assert (await response.get_json())["error"]["code"] == "not_found"


async def snapshot(api):
    response = await api.client().get("/feed?once=true")
    assert (response.status_code, response.mimetype) == (200, "application/json")
    return await response.get_json()


def record_two_exchanges(api):
    """Record a stream of A that completed and one that failed, then end the second."""
    worker = api.worker(A)
    api.instruments.metrics.record(ended(worker), worker)
    broken = ended(worker, outcome="stream_error", ended_by="worker", error="reset")
    api.instruments.metrics.record(broken, worker)
    api.instruments.recent.tick(time.time(), 3, 1)


async def test_a_snapshot_has_the_fleet_history_recent_ends_and_settings(api):
    api.healthy(A)
    record_two_exchanges(api)
    body = await snapshot(api)
    assert body["ready"] is True
    assert body["leaving"] is False
    assert (body["revision"], body["policy"]["name"]) == (1, "round_robin")
    a, b = body["fleet"]
    assert (a["url"], a["health"], a["routable"], a["why"]) == (A, "healthy", True, None)
    assert (a["errors"], a["rate"] > 0, a["first_p50_ms"] > 0) == (1, True, True)
    assert (b["routable"], b["first_p99_ms"], b["drain"]) == (False, None, None)
    (point,) = body["history"]
    assert (point["requests"], point["errors"], point["in_flight"], point["waiting"]) == (
        2,
        1,
        3,
        1,
    )
    assert {end["end"] for end in body["recent_ends"]} == {"completed", "stream_error"}
    assert body["recent_ends"][0]["total_ms"] == pytest.approx(1100)
    assert body["last_reload"] == {"outcome": "applied"}
    assert (body["key_required"], body["refused_without_key"]) == (False, 0)
    assert body["usage_metrics"] is False
    assert body["weights"]["workers"][0]["worker"] == A


async def test_the_time_when_a_worker_was_disabled_survives_a_restart(api):
    api.healthy(A)
    await api.client().put(f"/workers/{api.worker(A).id}", json={"disabled": True})
    store = api.config_store
    record = structs.replace(store.state.disabled_by[A], at="2026-11-20T08:00:00+00:00")
    store.state = structs.replace(store.state, disabled_by={A: record})
    (row, _) = (await snapshot(api))["fleet"]
    assert row["state_since"] == "2026-11-20T08:00:00+00:00"


async def test_the_last_minute_includes_the_current_second(api):
    api.healthy(A)
    worker = api.worker(A)
    api.instruments.metrics.record(ended(worker), worker)
    body = await snapshot(api)
    assert body["last_minute"] == {"requests": 1, "errors": 0}
    assert body["fleet"][0]["answers"] == 1
    assert body["history"] == []


async def test_a_worker_that_is_silent_with_requests_in_flight_is_reported(api):
    api.healthy(A)
    worker = api.worker(A)
    api.instruments.metrics.record(ended(worker), worker)
    worker.in_flight = 2
    for second in range(30, 20, -1):
        api.instruments.stall_detector.tick(time.time() - second)
    a, b = (await snapshot(api))["fleet"]
    assert a["silent_secs"] == pytest.approx(28, abs=4)
    assert b["silent_secs"] is None


async def test_the_feed_names_the_readers_key_and_role():
    api = build_api(entry(A), key="k")
    key = {"Authorization": "Bearer k"}
    body = await (await api.client().get("/feed?once=true", headers=key)).get_json()
    assert body["reader"] == {"name": "api_key", "role": "all"}
    without_key = await snapshot(build_api(entry(A)))
    assert without_key["reader"] == {"name": None, "role": "all"}


async def test_the_steps_of_a_request_are_shown_if_they_are_known(api):
    a, b = api.worker(A), api.worker(B)
    failed = [(b, "connect_failure")]
    exchange = ended(
        a, failed_attempts=failed, attempts=2, queued_secs=0.3, policy="random", client="10.0.0.9"
    )
    api.instruments.metrics.record(exchange, a)
    api.instruments.metrics.record(ended(a), a)
    plain, retried = sorted((await snapshot(api))["recent_ends"], key=lambda end: end["attempts"])
    assert [attempt["outcome"] for attempt in retried["tried"]] == ["connect_failure", "200"]
    assert [attempt["worker"] for attempt in retried["tried"]] == [B, A]
    assert retried["queue_ms"] == pytest.approx(300)
    assert (retried["policy"], retried["client"], retried["chunks"]) == ("random", "10.0.0.9", 10)
    assert (retried["head_ms"], retried["longest_gap_ms"]) == (pytest.approx(100), 400)
    assert plain.keys().isdisjoint(("tried", "queue_ms", "trace_id", "key"))


async def test_the_feed_and_the_metrics_need_the_key():
    api = build_api(entry(A), key="k")
    for path in ("/feed", "/feed?once=true", "/metrics"):
        assert (await api.client().get(path)).status_code == 401
        wrong = {"Authorization": "Bearer x"}
        assert (await api.client().get(path, headers=wrong)).status_code == 403


class Reader:
    """A client of the feed, at the app's ASGI interface. It disconnects when `left` is set."""

    def __init__(self):
        self.left = trio.Event()
        self.ended = trio.Event()
        self.status = 0
        self._requests, self._unread = [{"type": "http.request", "body": b""}], None
        self._send, self._receive = trio.open_memory_channel(0)

    async def run(self, app):
        await app(SCOPE, self._next, self._take)
        self.ended.set()

    async def _next(self):
        if not self._requests:
            await self.left.wait()
            return {"type": "http.disconnect"}
        return self._requests.pop()

    async def _take(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            await self._send.send(message["body"])

    async def event(self):
        """The next event, decoded."""
        *_, last = (await self._receive.receive()).decode().strip().splitlines()
        return json.loads(last.removeprefix("data: "))


@asynccontextmanager
async def reading(api):
    reader = Reader()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.run, api.app)
            yield reader
            reader.left.set()
            await reader.ended.wait()


@pytest.mark.parametrize(("word", "status"), [("on", 200), ("True", 200), ("maybe", 400)])
async def test_once_is_a_boolean(api, word, status):
    assert (await api.client().get(f"/feed?once={word}")).status_code == status


async def test_a_reader_gets_the_whole_history_once_then_only_new_points(api):
    seconds = iter(range(1001, 1009))
    for _ in range(3):
        api.instruments.recent.tick(next(seconds), 0, 0)
    events = []
    async with reading(api) as reader:
        for _ in range(3):
            events.append(await reader.event())
            api.instruments.recent.tick(next(seconds), 0, 0)
    assert [[point["at"] for point in event["history"]] for event in events] == [
        [1001, 1002, 1003],
        [1004],
        [1005],
    ]


async def test_a_reader_that_disconnects_frees_its_place(monkeypatch):
    monkeypatch.setattr(dashboard_routes, "READERS", 1)
    api = build_api(entry(A))
    for _ in range(2):
        async with reading(api) as reader:
            await reader.event()
            assert reader.status == 200
            refused = await api.client().get("/feed")
            assert refused.status_code == 503
            assert (await refused.get_json())["error"]["code"] == "too_many_readers"
            assert (await api.client().get("/feed?once=true")).status_code == 200


async def test_readers_are_disconnected_during_a_drain(api):
    async with reading(api) as reader:
        await reader.event()
        api.data_plane.draining = True
        await reader.ended.wait()
    assert (await snapshot(api))["ready"] is False


def why(api, url=A):
    state = operator_state(api.operations.journal, api.config_store)
    return reasons(api.services.workers, state)(api.worker(url))


def test_one_sentence_explains_why_a_worker_gets_no_requests(api):
    assert why(api) == "waiting for its first probe"
    failed = {"status": None, "error": "connection refused", "at": NOW, "epoch": 0}
    api.fleet.observe_probe(api.worker(A), **failed)
    assert why(api) == "not up yet: connection refused"
    api.healthy(A)
    worker = api.worker(A)
    assert why(api) is None
    api.fleet.cordon(worker, "updating")
    assert why(api) == "held: updating"
    worker.disabled = True
    assert why(api) == "disabled by an operator"
    worker.in_flight = 2
    assert why(api) == "draining: 2 in flight"
    worker.disabled = False
    api.fleet.uncordon(worker, "updating")
    worker.health.half_open_id = 1
    assert why(api).startswith("half-open")
    api.fleet.mark_dead(worker, NOW)
    assert why(api) == "dead: no reason known"
    api.fleet.mark_dead(worker, NOW, declared=True)
    assert why(api) == "dead: declared so by an operator"
    assert why(api, B).startswith("waiting")


def record_history(api):
    now = time.time()
    worker = api.worker(A)
    for second in range(-200, 0):
        api.instruments.history_sampler.step(now + second)
        api.instruments.end_second(now + second)
        api.instruments.metrics.record(ended(worker), worker)


async def history(api, query=""):
    response = await api.client().get(f"/history{query}")
    assert response.status_code == 200
    return await response.get_json()


async def test_the_default_is_the_whole_fleet_for_15_minutes(api):
    record_history(api)
    body = await history(api)
    assert (body["secs"], body["step_secs"], body["metrics"]) == (900, 5, True)
    assert list(body["series"]) == list(SERIES)
    assert {len(values) for values in body["series"].values()} == {POINTS}
    assert max(filter(None, body["series"]["requests_per_sec"])) == pytest.approx(1)
    assert body["from"] + POINTS * 5 == pytest.approx(time.time(), abs=6)


async def test_a_worker_series_and_a_longer_range_can_be_selected(api):
    record_history(api)
    body = await history(api, f"?secs=21600&series=first_p50_ms,in_flight&worker={B}")
    assert (body["step_secs"], body["worker"]) == (120, B)
    assert list(body["series"]) == ["first_p50_ms", "in_flight"]
    assert set(body["series"]["first_p50_ms"]) == {None}
    body = await history(api, f"?secs=21600&series=first_p50_ms&worker={A}")
    assert any(body["series"]["first_p50_ms"])


async def test_by_worker_each_worker_has_its_own_series(api):
    record_history(api)
    a, b = (await history(api, "?by=worker&series=first_p50_ms"))["workers"]
    assert (a["url"], b["url"]) == (A, B)
    assert any(a["series"]["first_p50_ms"])
    assert not any(b["series"]["first_p50_ms"])


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("secs=901", 400, "900, 3600, 21600"),
        ("series=first", 400, "first_p50_ms"),
        ("by=model", 400, "by must be worker"),
        ("worker=http://c:1", 404, "not found"),
    ],
)
async def test_an_invalid_query_is_refused_with_the_reason(api, query, status, text):
    response = await api.client().get(f"/history?{query}")
    assert response.status_code == status
    assert text in (await response.get_json())["error"]["message"]


async def test_the_history_needs_the_key():
    assert (await build_api(entry(A), key="k").client().get("/history")).status_code == 401
