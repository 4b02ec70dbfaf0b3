"""The same steps, with and without the fast path, have equal results (a stateful comparison)."""

import contextlib
import itertools
import socket

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from omni_proxy.config.parse import parse
from tests.dataplane.both_drivers import (
    OK_RESPONSE,
    World,
    chat_request,
    flush_after_each_event,
    worker_sockets,
)
from tests.example_counts import examples
from tests.weighted_choice import weighted

STREAMED = b'{"messages": [], "stream": true}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNK, LAST = b"8\r\ndata: x\n\r\n", b"0\r\n\r\n"
CLOSES = None


def counted(status=b"200 OK", body=b"{}", *, fields=b"", length=None):
    length = len(body) if length is None else length
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, fields, length, body)


PLANS = st.sampled_from(
    [
        *[(OK_RESPONSE,)] * 8,
        (HEAD + b"date: one\r\ncontent-length: 2\r\n\r\n{}",),
        (HEAD + b"date: two\r\ncontent-length: 2\r\n\r\n{}",),
        (OK_RESPONSE[:30], OK_RESPONSE[30:]),
        (OK_RESPONSE[:-4], OK_RESPONSE[-4:]),  # within the blank line
        (OK_RESPONSE[:-2], OK_RESPONSE[-2:]),
        (OK_RESPONSE[:-1], OK_RESPONSE[-1:]),
        (OK_RESPONSE[:-1], CLOSES),
        (OK_RESPONSE + b"HTTP",),
        (OK_RESPONSE, OK_RESPONSE),
        (OK_RESPONSE, CLOSES),
        (OK_RESPONSE + OK_RESPONSE,),
        (CLOSES,),
        (counted(body=b""),),
        (counted(body=bytes(5000)),),
        (counted(body=bytes(40000)[:4095]),),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK_RESPONSE,),
        (b"HTTP/1.1 100 Continue\r\n\r\n", OK_RESPONSE),
        (b"HTTP/1.1 204 No Content\r\n\r\n",),
        (counted(b"404 Not Found"),),
        (counted(b"429 Too Many Requests", fields=b"retry-after: 1\r\n"),),
        *[(counted(status),) for status in (b"500 Oh", b"502 Oh", b"503 Busy", b"504 Late")],
        (counted(fields=b"connection: close\r\n"), CLOSES),
        (counted(fields=b"connection: close\r\n"),),
        (counted(fields=b"content-length: 7\r\n"),),
        (OK_RESPONSE.replace(b"HTTP/1.1", b"HTTP/1.0"),),
        (OK_RESPONSE.replace(b": 2", b": 02"),),
        (OK_RESPONSE.replace(b"content-length", b"Content-Length"),),
        (HEAD + b"\r\n{", b"}", CLOSES),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + CHUNK + LAST,),
        (SSE + b"transfer-encoding: chunked\r\n\r\n", CHUNK, CHUNK + LAST),
        (SSE + b"transfer-encoding: chunked\r\n\r\n" + CHUNK, CLOSES),
        (SSE + b"content-length: 4\r\n\r\ndata",),
        (b"nonsense\r\n\r\n",),
        (b"\r\n\r\n",),
    ]
)
BODIES = st.sampled_from(
    [b'{"messages": []}'] * 6
    + [STREAMED, b"", b"{", b"[]", b'{"request_id": "of the body"}', b'{"model": "m"}']
    + [b'{"messages": "%b"}' % (b"x" * size) for size in (3000, 4076, 4077, 20000)]
)
FIELDS = st.sampled_from(
    [()] * 8
    + [
        (b"expect: 100-continue",),
        (b"connection: close",),
        (b"x-sglang-omni-route-stream: true",),
        (b"x-session-id: me",),
        (b"traceparent: 00-ab",),
        (b"traceparent: 1", b"TRACEPARENT: 2"),
        (b"x-request-id: again",),
        (b"transfer-encoding: chunked",),
        (b"content-length: 3",),
    ]
)
REQUESTS = st.builds(
    chat_request,
    st.sampled_from([b"content-length"] * 4 + [b"Content-Length", b"CONTENT-LENGTH"]),
    st.sampled_from([b""] * 4 + [b"one", b"two", b"two words", b"x" * 128, b"x" * 129, b"\xe9"]),
    BODIES,
    fields=FIELDS,
    reversed_fields=st.booleans(),
) | st.builds(chat_request, length=st.sampled_from([b"15", b"17", b"016", b"+16", b"", b"1e1"]))
# What happens at the moment the request is sent.
MEANWHILE = st.sampled_from(["", "", "", "half", "dies", "early"])
WHO, AT = st.integers(0, 2), st.integers(0, 1)
# The request id and the body of a request that is otherwise like the client's last ones.
SIMILAR = st.tuples(
    st.sampled_from([b"one"] * 4 + [b"two", b"two words", b"x" * 128, b"x" * 129, b"\xe9", b""]),
    st.sampled_from([b'{"messages": []}'] * 6 + [STREAMED, b"", b"{", b'{"request_id": "inner"}']),
)
STEPS = weighted(
    (4, st.tuples(st.just("exchange"), st.integers(0, 1), SIMILAR, PLANS)),
    (2, st.tuples(st.just("send_similar"), st.integers(0, 1), SIMILAR)),
    (3, st.tuples(st.just("respond"), PLANS)),
    (2, st.just(("continue_response",))),
    (1, st.tuples(st.just("send"), WHO, REQUESTS, MEANWHILE)),
    (1, st.tuples(st.just("send"), WHO, st.just(chat_request()), st.just(""))),
    (1, st.tuples(st.just("split"), WHO, REQUESTS, st.integers(-200, 30))),
    (1, st.tuples(st.just("split"), WHO, st.just(chat_request(body=b"")), st.integers(-1, 4))),
    (1, st.tuples(st.just("pipeline"), WHO, REQUESTS, REQUESTS)),
    (1, st.tuples(st.just("disconnect"), WHO, st.sampled_from(["half", "whole"]))),
    (1, st.tuples(st.just("receive"), WHO)),
    (1, st.just(("drain",))),
    (1, st.tuples(st.just("disable"), AT, st.booleans())),
    (1, st.tuples(st.just("limit_inflight"), AT, st.integers(0, 1))),
    (1, st.tuples(st.just("set_api_key"), AT)),
    (1, st.just(("remove",))),
    (1, st.tuples(st.just("set_version"), AT, st.sampled_from(["v1", "v2"]))),
    (1, st.tuples(st.just("fail"), AT, st.booleans())),
    (1, st.tuples(st.just("wait"), st.sampled_from([1, 6, 400]))),
    (1, st.tuples(st.just("reconfigure"), st.sampled_from(["", "sse_keepalive_secs = 5\n"]))),
)
SERVER = st.lists(
    st.sampled_from(
        [
            "half_close = 'answer'\n",
            "queue_size = 2\nqueue_timeout_secs = 5\n",
            "request_timeout_secs = 5\n",
            "request_id_header = 'x-request-id'\n",
        ]
    ),
    unique=True,
    max_size=3,
).map("".join)
ROUTING = st.sampled_from(
    [
        "",
        "policy = 'least_request'\n",
        "sticky_sessions = true\n",
        "policy = 'cache_aware'\n",
        "max_total_retries = 1\nmax_worker_retries = 1\n",
        "max_worker_retries = 2\neject = 'remove'\n",
    ]
)


def configured(server, routing):
    return f"[server]\nlog_format = 'json'\n{server}[routing]\n{routing}"


class Course:
    """Runs the steps in one world, and records a snapshot after each."""

    def __init__(self, world, server, routing, *, ids, traced):
        self.world, self.server, self.routing = world, server, routing
        self.ids = ids  # whether the clients send request ids
        self.traces = itertools.count() if traced else None  # a field that is new in every request
        self.snapshots = []

    def run(self, slow, steps):
        for at, warm in enumerate((6, 2, 0)):
            warm_request = chat_request(request_id=b"warm" if self.ids else b"")
            self.world.connect_client(slow=slow and at == 0, warm=warm, warm_request=warm_request)
        for who in (0, 1) if self.traces else ():
            for _ in range(4):
                self.exchange(who, (b"warm", b'{"messages": []}'), (OK_RESPONSE,))
        self.record("warm")
        for step in steps:
            getattr(self, step[0])(*step[1:])
            self.record(step)
        self.world.finish()
        self.snapshots.append(self.world.snapshot(whole=True))

    def record(self, step):
        self.snapshots.append({"step": step, **self.world.snapshot()})

    def send(self, who, request, meanwhile):
        world, client = self.world, self.world.clients[who]
        with contextlib.suppress(OSError):
            client.sock.sendall(request)
            if meanwhile == "half":
                client.sock.shutdown(socket.SHUT_WR)
        for connection in world.idle_connections() if meanwhile in ("dies", "early") else ():
            connection.to_send = [None if meanwhile == "dies" else OK_RESPONSE]
            connection.send_next()
        world.run_until_idle()

    def send_similar(self, who, request):
        request_id, body = request
        fields = () if self.traces is None else (b"CF-Ray: %d-abc" % next(self.traces), b"a: b")
        similar = chat_request(request_id=request_id if self.ids else b"", body=body, fields=fields)
        self.world.client_sends(self.world.clients[who], similar)

    def exchange(self, who, request, plan):
        self.send_similar(who, request)
        self.respond(plan)
        for _ in plan[1:]:
            self.continue_response()

    def split(self, who, request, at):
        """Send the request in two pieces, cut at this distance from the end of its head."""
        at = max(request.index(b"\r\n\r\n") + at, 1)
        self.world.client_sends(self.world.clients[who], request[:at], request[at:])

    def pipeline(self, who, one, other):
        self.world.client_sends(self.world.clients[who], one + other)

    def respond(self, plan):
        self.world.worker_responds(*plan)

    def continue_response(self):
        self.world.worker_continues()

    def disconnect(self, who, how):
        self.world.clients[who].disconnect(half=how == "half")
        self.world.run_until_idle()

    def receive(self, who):
        self.world.clients[who].receive()
        self.world.run_until_idle()

    def drain(self):
        self.world.dataplane.begin_drain()
        self.world.run_until_idle()

    def disable(self, at, how):
        self.change(at, disabled=how)

    def limit_inflight(self, at, bound):
        self.change(at, max_inflight=bound)

    def set_api_key(self, at):
        if not self.world.dataplane.in_flight:  # else a retry may have it or not
            self.change(at, api_key_env="KEY_OF_A_WORKER")

    def change(self, at, **fields):
        if at < len(self.world.entries):
            self.world.change_worker(at, **fields)

    def remove(self):
        if self.world.entries:
            self.world.remove_worker(0)

    def set_version(self, at, label):
        fleet = self.world.fleet
        for worker in fleet.workers[at : at + 1]:
            fleet.set_version(worker, label, 0)
        self.world.run_until_idle()

    def fail(self, at, out):
        fleet = self.world.fleet
        for worker in fleet.workers[at : at + 1]:
            self.world.eject(worker) if out else self.world.record_failure(worker)

    def wait(self, secs):
        self.world.wait(secs)

    def reconfigure(self, more):
        self.world.dataplane.configure(parse(configured(self.server + more, self.routing)))
        self.world.run_until_idle()


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(sock) for name, sock in worker_sockets(tmp_path).items()}


def run_course(listeners, case, *, use_fast_path):
    (server, routing), (slow, at_once, ids, traced), steps = case
    with pytest.MonkeyPatch.context() as patch:
        if at_once:
            flush_after_each_event(patch)
        patch.setenv("KEY_OF_A_WORKER", "secret")
        unpatched = World(listeners, configured(server, routing), use_fast_path=use_fast_path)
        with unpatched.patched() as world:
            course = Course(world, server, routing, ids=ids, traced=traced)
            course.run(slow, steps)
            assert not world.dataplane.loop.tasks
            assert world.dataplane.in_flight == 0
            assert len(world.log) == sum(world.dataplane.services.totals.ended.values())
    return course


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(
        st.tuples(SERVER, ROUTING),
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        st.lists(STEPS, min_size=4, max_size=20),
    )
)
def test_the_fast_path_has_the_results_of_the_slow_path(listeners, case):
    slow, fast = (
        run_course(listeners, case, use_fast_path=use_fast_path) for use_fast_path in (False, True)
    )
    for expected, actual in zip(slow.snapshots, fast.snapshots, strict=True):
        assert actual == expected
    assert slow.world.began == 0
    event(f"began {min(fast.world.began // 2 * 2, 10)}")
    event(f"whole {min((fast.world.began - fast.world.handed_over) // 2 * 2, 10)}")
