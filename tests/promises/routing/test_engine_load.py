"""Load of engines in the whole program: from responses or polled, shared by every process."""

import json
from collections import Counter

import trio

from tests.promises.support.fakes import FakeWorker, counted
from tests.promises.support.fleet_program import chat, program, put
from tests.promises.support.processes_fixture import serving

FILE = """\
[server]
port = 0
processes = 2
[health]
interval_secs = 0.2
success_threshold = 1
[routing]
overload_waiting = 8
load_max_age_secs = {age}
load_poll_secs = {poll}
[[workers]]
url = "{a}"
[[workers]]
url = "{b}"
"""


class Engine(FakeWorker):
    """Reports `waiting` in responses if `in_responses`, and in /metrics if `in_metrics`."""

    def __init__(self, waiting):
        super().__init__(self._answer)
        self.waiting = waiting
        self.in_responses, self.in_metrics = True, False
        self.formats = Counter()  # of the load, as the requests ask for it

    async def _answer(self, call):
        method, path, _ = call.line.split()
        if method == "POST":
            self.formats[dict(call.fields).get("endpoint-load-metrics-format")] += 1
            named = {"num_requests_waiting": self.waiting, "kv_cache_usage_perc": 0.25}
            load = "endpoint-load-metrics: JSON " + json.dumps({"named_metrics": named})
            lines = ["content-type: application/json", *([load] if self.in_responses else ())]
            await call.send(counted(b'{"id": "x"}', *lines))
        elif path == "/metrics" and self.in_metrics:
            text = b'vllm:num_requests_waiting{engine="0"} %d\n' % self.waiting
            await call.send(counted(text))
        else:
            await call.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    @property
    def posts(self):
        return sum(self.formats.values())


def load_of(body, engine):
    (row,) = [row for row in body["workers"] if row["url"] == engine.url]
    return row["engine_load"] or {"state": "unknown"}


async def shares(running, a, b):
    """How many of eight requests each engine gets, over new connections."""
    before = a.posts, b.posts
    for _ in range(8):
        answer = await running.client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 200
        assert "endpoint-load-metrics" not in answer.headers
    return a.posts - before[0], b.posts - before[1]


async def until_shares(running, a, b, condition):
    with trio.fail_after(60):
        while not condition(*await shares(running, a, b)):
            pass


async def test_an_overloaded_engine_gets_no_request_from_any_process(tmp_path):
    a, b, file = Engine(9), Engine(0), tmp_path / "proxy.toml"
    async with trio.open_nursery() as nursery:
        for engine in (a, b):
            await nursery.start(engine.serve)
        urls = {"a": a.url, "b": b.url}
        put(file, FILE.format(**urls, age=600, poll=0))
        async with program("--config", file) as running:
            # Each request uses a new connection, which any process may accept.
            running.client.headers["connection"] = "close"
            await running.until_routable(a, b)
            await running.until("/status", lambda body: serving(body, 2))
            await until_shares(running, a, b, lambda at_a, _: not at_a)
            body = await running.until(
                "/workers", lambda body: load_of(body, a)["state"] == "overloaded"
            )
            assert (load_of(body, a)["waiting"], load_of(body, b)["state"]) == (9.0, "ok")
            assert set(a.formats) == set(b.formats) == {"JSON"}
            explained = await running.client.post("/explain?path=/v1/chat/completions", json=chat())
            assert explained.json()["pick"]["url"] == b.url
            assert "overloaded: 9 requests wait in its engine" in explained.text
            metrics = (await running.client.get("/metrics")).text
            assert f'omni_proxy_worker_engine_waiting{{worker="{a.url}"}} 9.0' in metrics
            assert f'omni_proxy_worker_overloaded{{worker="{a.url}"}} 1.0' in metrics
            response = await running.client.post(
                "/v1/chat/completions",
                json=chat(),
                headers={"endpoint-load-metrics-format": "JSON"},
            )
            assert '"num_requests_waiting": 0' in response.headers["endpoint-load-metrics"]

            # Polled from here on: only the main process polls, and all processes get the loads.
            for engine, waiting in ((a, 0), (b, 20)):
                engine.in_responses, engine.in_metrics, engine.waiting = False, True, waiting
            put(file, FILE.format(**urls, age=600, poll=0.1))
            await until_shares(running, a, b, lambda _, at_b: not at_b)

            # An engine that no longer reports its load becomes stale, and gets requests again.
            b.in_metrics = False
            put(file, FILE.format(**urls, age=1, poll=0.1))
            await running.until("/workers", lambda body: load_of(body, b)["state"] == "stale")
            await until_shares(running, a, b, lambda _, at_b: at_b)
        nursery.cancel_scope.cancel()
