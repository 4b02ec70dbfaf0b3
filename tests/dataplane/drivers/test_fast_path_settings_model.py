"""Steps with and without the fast path have equal results under any combination of settings: keys
with limits, traces, usage metrics, aliases, ranks and load reports."""

import contextlib
import json
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from omni_proxy.api_keys.caller_limits import LocalRows
from omni_proxy.api_keys.key_table import KeyTable
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.drivers import fast_path
from omni_proxy.dataplane.exchange import request_trace
from tests.dataplane.both_drivers import (
    OK_RESPONSE,
    World,
    chat_request,
    with_sorted_fields,
    worker_sockets,
)
from tests.dataplane.drivers.test_fast_path_model import (
    CHUNK,
    CLOSES,
    HEAD,
    LAST,
    SSE,
    Course,
    counted,
)
from tests.example_counts import examples
from tests.weighted_choice import weighted

TRACE_ID, SPAN_ID = b"ab" * 16, b"cd" * 8
USAGE = b'{"usage": {"prompt_tokens": 7, "completion_tokens": %d, "total_tokens": 9}}'
LOAD = b'endpoint-load-metrics: JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": %d.0}}\r\n'
KEYS = (b"key-a", b"key-b")
LIMITS = ["", "max_inflight = 1\n", "requests_per_minute = 9\n", "tokens_per_minute = 400\n"]
LIMITS += ["models = ['m', 'alias']\n", "priority = 3\n"]


def key_tables(limits):
    return "".join(
        f'[[keys]]\nname = "team-{number}"\nkey_sha256 = "{sha256(key).hexdigest()}"\n{limit}'
        for number, (key, limit) in enumerate(zip(KEYS, limits, strict=True))
    )


# The parts of a configuration. RANKS: the number of ranks of both workers.
SERVER = st.sampled_from(["", "usage_metrics = true\n", "queue_size = 2\nqueue_timeout_secs = 5\n"])
ROUTING = st.sampled_from(
    ["", "overload_waiting = 8\n", "policy = 'least_request'\n", "policy = 'cache_aware'\n",
     "max_worker_retries = 2\noverload_waiting = 8\n"]
)  # fmt: skip
KEY_TABLES = st.just("") | st.tuples(st.sampled_from(LIMITS), st.sampled_from(LIMITS)).map(
    key_tables
)
TRACING = st.sampled_from(
    [""]
    + [
        f"[observe]\notlp_endpoint = 'http://c:4318'\ntrace_sampling = {rate}\n"
        for rate in (0.0, 1.0)
    ]
)
ALIASES = st.sampled_from(
    [""]
    + [
        f"[[routing.models]]\nname = 'alias'\nrewrite = {rewrite}\ntargets = [{targets}]\n"
        for rewrite in ("true", "false")
        for targets in ("{model = 'm'}", "{model = 'm', weight = 3}, {model = 'other', weight = 1}")
    ]
)
CONFIG = st.tuples(SERVER, ROUTING, ALIASES, TRACING, KEY_TABLES)
RANKS = st.sampled_from([0, 0, 2])

BODIES = st.sampled_from(
    [b'{"messages": []}'] * 4
    + [b'{"model": "alias", "messages": []}'] * 3
    + [
        b'{"model": "m", "max_tokens": 5}',
        b'{"max_tokens": 5, "model" : "alias"}',
        b'{"model": "alias", "model": "m"}',
        b'{"model": "alias", "stream": true}',
        b'{"model": "none"}',
        b'{"routed_dp_rank": 1, "messages": []}',
        b'{"data_parallel_rank": 7}',
        b'{"messages": "\xff"}',
        b"{",
        b"",
    ]
)
TRACES = st.sampled_from(
    [b"00-%b-%b-%b" % (TRACE_ID, SPAN_ID, flag) for flag in (b"00", b"01", b"01")]
    + [b"nonsense", b"00-%b-%b-01" % (b"0" * 32, SPAN_ID)]
)
PLANS = st.sampled_from(
    [(OK_RESPONSE,)] * 4
    + [(counted(body=USAGE % count),) for count in (2, 2, 500)]
    + [(counted(fields=LOAD % waiting),) for waiting in (0, 1, 8)]
    + [
        (counted(body=USAGE % 2)[:-9], (USAGE % 2)[-9:]),
        (counted(b"404 Not Found"),),
        (counted(b"503 Busy"),),
        (OK_RESPONSE, CLOSES),
        (CLOSES,),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + CHUNK + LAST,),
        (SSE + b"transfer-encoding: chunked\r\n\r\n", CHUNK, CHUNK + LAST),
    ]
)
# Each client's key, and whether it sends a traceparent. Its first heads fill the cache.
CLIENTS = ((KEYS[0], False), (KEYS[0], True), (KEYS[1], False))
OTHER_KEY = st.sampled_from([None] * 9 + [KEYS[0], KEYS[1], b"wrong", b""])
REQUEST = st.tuples(OTHER_KEY, TRACES, BODIES)
WHO, AT = st.integers(0, 2), st.integers(0, 1)
STEPS = weighted(
    (16, st.tuples(st.just("exchange"), WHO, REQUEST, PLANS)),
    (1, st.tuples(st.just("send_similar"), WHO, REQUEST)),
    (2, st.tuples(st.just("respond"), PLANS)),
    (1, st.just(("continue_response",))),
    (1, st.tuples(st.just("disconnect"), WHO, st.sampled_from(["half", "whole"]))),
    (1, st.tuples(st.just("disable"), AT, st.booleans())),
    (1, st.tuples(st.just("limit_inflight"), AT, st.integers(0, 1))),
    (1, st.tuples(st.just("set_api_key"), AT)),
    (1, st.tuples(st.just("set_ranks"), AT, st.sampled_from([0, 2]))),
    (1, st.tuples(st.just("set_version"), AT, st.sampled_from(["v1", "v2"]))),
    (1, st.tuples(st.just("fail"), AT, st.booleans())),
    (1, st.tuples(st.just("wait"), st.sampled_from([1, 6, 61]))),
    (1, st.tuples(st.just("reconfigure"), CONFIG)),
)


class SettingsWorld(World):
    def __init__(self, listeners, config, *, use_fast_path, ranks):
        fields = {name: {"ranks": ranks} for name in listeners}
        super().__init__(listeners, config, use_fast_path=use_fast_path, fields=fields)
        self.spans = []
        self.dataplane.recorders.spans = self.Spans(self.spans)

    class Spans:
        def __init__(self, kept):
            self.kept = kept

        def write(self, record):
            for span in json.loads(record):
                span["took"] = span.pop("ended_ns") - span.pop("started_ns")
                self.kept.append(span)

    def snapshot(self, *, whole=False):
        callers = self.dataplane.settings.callers
        return {
            **super().snapshot(whole=whole),
            "workers": [
                (connection.name, with_sorted_fields(connection.received), connection.state)
                for connection in self.worker_connections
            ],
            "spans": list(self.spans),
            "callers": [(each.name, each.in_flight) for each in callers],
            "loads": [
                worker.engine_load and worker.engine_load.report for worker in self.fleet.workers
            ],
            "ranks": [
                (rank.url, rank.in_flight)
                for worker in self.fleet.workers
                for rank in worker.dp_ranks
            ],
        }


def configured(config):
    server, routing, aliases, tracing, keys = config
    return f"[server]\nlog_format = 'json'\n{server}[routing]\n{routing}{aliases}{tracing}{keys}"


class SettingsCourse(Course):
    def __init__(self, world):
        super().__init__(world, "", "", ids=False, traced=False)

    def run(self, slow, steps):
        for who in range(len(CLIENTS)):
            self.world.connect_client()
            for flag in (b"00", b"01") * 3:
                traceparent = b"00-%b-%b-%b" % (TRACE_ID, SPAN_ID, flag)
                self.exchange(who, (None, traceparent, b'{"messages": []}'), (OK_RESPONSE,))
        self.world.began = self.world.handed_over = 0
        self.record("warm")
        for step in steps:
            getattr(self, step[0])(*step[1:])
            self.record(step)
        self.world.finish()
        self.snapshots.append(self.world.snapshot(whole=True))

    def send_similar(self, who, request):
        other_key, traceparent, body = request
        key, sends_traceparent = CLIENTS[who]
        key = key if other_key is None else other_key
        fields = [b"Authorization: Bearer " + key] if key else []
        fields += [b"traceparent: " + traceparent] if sends_traceparent else []
        self.world.client_sends(self.world.clients[who], chat_request(body=body, fields=fields))

    def exchange(self, who, request, plan):
        client = self.world.clients[who]
        if client.state != "open":  # its last request was rejected, or it disconnected
            client.disconnect()
            self.world.clients[who] = self.world.connect_client()
            del self.world.clients[-1]
        super().exchange(who, request, plan)

    def set_ranks(self, at, count):
        self.change(at, ranks=count)

    def reconfigure(self, config):
        """Reload a changed configuration file."""
        parsed = parse(configured(config))
        self.world.dataplane.configure(parsed)
        slots = {key.name: slot for slot, key in enumerate(parsed.keys, start=1)}
        self.world.dataplane.follow_keys(KeyTable(parsed.keys), slots, LocalRows())
        self.world.run_until_idle()


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(sock) for name, sock in worker_sockets(tmp_path).items()}


def run_course(listeners, config, ranks, steps, *, use_fast_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_A_WORKER", "secret")
        for module in (request_trace, fast_path):  # both draw the same ids
            patch.setattr(module, "getrandbits", lambda bits: 7)
        unpatched = SettingsWorld(
            listeners, configured(config), use_fast_path=use_fast_path, ranks=ranks
        )
        with unpatched.patched() as world:
            course = SettingsCourse(world)
            course.run(False, steps)
            assert not world.dataplane.loop.tasks
            assert world.dataplane.in_flight == 0
            assert not any(caller.in_flight for caller in world.dataplane.settings.callers)
    return course


@settings(
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(CONFIG, RANKS, st.lists(STEPS, min_size=8, max_size=30))
def test_any_settings_have_the_results_of_the_slow_path(listeners, config, ranks, steps):
    slow, fast = (
        run_course(listeners, config, ranks, steps, use_fast_path=use_fast_path)
        for use_fast_path in (False, True)
    )
    for expected, actual in zip(slow.snapshots, fast.snapshots, strict=True):
        assert actual == expected
    assert slow.world.began == 0
    event(f"began {min(fast.world.began // 2 * 2, 10)}")
    event(f"whole {min((fast.world.began - fast.world.handed_over) // 2 * 2, 10)}")
