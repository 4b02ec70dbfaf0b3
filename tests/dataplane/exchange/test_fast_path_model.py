"""The fast path against the slow path: the same steps on a data plane of each have equal results."""

import contextlib
import itertools
import socket

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.loop import event_loop
from tests.dataplane.both_drivers import WHOLE, World, chat_request, worker_sockets
from tests.example_counts import examples
from tests.weighted_choice import weighted

STREAMED = b'{"messages": [], "stream": true}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNK, LAST = b"8\r\ndata: x\n\r\n", b"0\r\n\r\n"
CLOSES = None


def counted(status=b"200 OK", body=b"{}", *, fields=b"", length=None):
    output = len(body) if length is None else length
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, fields, output, body)


PLANS = st.sampled_from(
    [
        *[(WHOLE,)] * 8,
        (HEAD + b"date: one\r\ncontent-length: 2\r\n\r\n{}",),
        (HEAD + b"date: two\r\ncontent-length: 2\r\n\r\n{}",),
        (WHOLE[:30], WHOLE[30:]),
        (WHOLE[:-4], WHOLE[-4:]),  # within the blank line
        (WHOLE[:-2], WHOLE[-2:]),
        (WHOLE[:-1], WHOLE[-1:]),
        (WHOLE[:-1], CLOSES),
        (WHOLE + b"HTTP",),
        (WHOLE, WHOLE),
        (WHOLE, CLOSES),
        (WHOLE + WHOLE,),
        (CLOSES,),
        (counted(body=b""),),
        (counted(body=bytes(5000)),),
        (counted(body=bytes(40000)[:4095]),),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,),
        (b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE),
        (b"HTTP/1.1 204 No Content\r\n\r\n",),
        (counted(b"404 Not Found"),),
        (counted(b"429 Too Many Requests", fields=b"retry-after: 1\r\n"),),
        *[(counted(status),) for status in (b"500 Oh", b"502 Oh", b"503 Busy", b"504 Late")],
        (counted(fields=b"connection: close\r\n"), CLOSES),
        (counted(fields=b"connection: close\r\n"),),
        (counted(fields=b"content-length: 7\r\n"),),
        (WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"),),
        (WHOLE.replace(b": 2", b": 02"),),
        (WHOLE.replace(b"content-length", b"Content-Length"),),
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
    turned=st.booleans(),
) | st.builds(chat_request, length=st.sampled_from([b"15", b"17", b"016", b"+16", b"", b"1e1"]))
BESIDES = st.sampled_from(["", "", "", "half", "dies", "early"])
WHO, AT = st.integers(0, 2), st.integers(0, 1)
# As the client's last requests were written.
LIKE = st.tuples(
    st.sampled_from([b"one"] * 4 + [b"two", b"two words", b"x" * 128, b"x" * 129, b"\xe9", b""]),
    st.sampled_from([b'{"messages": []}'] * 6 + [STREAMED, b"", b"{", b'{"request_id": "inner"}']),
)
STEPS = weighted(
    (4, st.tuples(st.just("exchange"), st.integers(0, 1), LIKE, PLANS)),
    (2, st.tuples(st.just("like"), st.integers(0, 1), LIKE)),
    (3, st.tuples(st.just("answer"), PLANS)),
    (2, st.just(("more",))),
    (1, st.tuples(st.just("ask"), WHO, REQUESTS, BESIDES)),
    (1, st.tuples(st.just("ask"), WHO, st.just(chat_request()), st.just(""))),
    (1, st.tuples(st.just("split"), WHO, REQUESTS, st.integers(-200, 30))),
    (1, st.tuples(st.just("split"), WHO, st.just(chat_request(body=b"")), st.integers(-1, 4))),
    (1, st.tuples(st.just("two"), WHO, REQUESTS, REQUESTS)),
    (1, st.tuples(st.just("leaves"), WHO, st.sampled_from(["half", "whole"]))),
    (1, st.tuples(st.just("reads"), WHO)),
    (1, st.just(("drain",))),
    (1, st.tuples(st.just("disable"), AT, st.booleans())),
    (1, st.tuples(st.just("bound"), AT, st.integers(0, 1))),
    (1, st.tuples(st.just("key"), AT)),
    (1, st.just(("remove",))),
    (1, st.tuples(st.just("version"), AT, st.sampled_from(["v1", "v2"]))),
    (1, st.tuples(st.just("fails"), AT, st.booleans())),
    (1, st.tuples(st.just("wait"), st.sampled_from([1, 6, 400]))),
    (1, st.tuples(st.just("config"), st.sampled_from(["", "sse_keepalive_secs = 5\n"]))),
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
    """Does the steps in one world, and keeps what each came to."""

    def __init__(self, world, server, routing, *, ids, traced):
        self.world, self.server, self.routing = world, server, routing
        self.ids = ids  # whether its clients give them
        self.traces = itertools.count() if traced else None  # a field that is new in every request
        self.seen = []

    def go(self, slow, steps):
        for at, warm in enumerate((6, 2, 0)):
            like = chat_request(request_id=b"warm" if self.ids else b"")
            self.world.connect_client(slow=slow and at == 0, warm=warm, like=like)
        for who in (0, 1) if self.traces else ():
            for _ in range(4):
                self.exchange(who, (b"warm", b'{"messages": []}'), (WHOLE,))
        self.keep("warm")
        for step in steps:
            getattr(self, step[0])(*step[1:])
            self.keep(step)
        self.world.finish()
        self.seen.append(self.world.seen(whole=True))

    def keep(self, step):
        self.seen.append({"step": step, **self.world.seen()})

    def ask(self, who, request, besides):
        world, client = self.world, self.world.clients[who]
        with contextlib.suppress(OSError):
            client.sock.sendall(request)
            if besides == "half":
                client.sock.shutdown(socket.SHUT_WR)
        for end in world.idle_ends() if besides in ("dies", "early") else ():
            end.plan = [None if besides == "dies" else WHOLE]
            end.say()
        world.turn()

    def like(self, who, request):
        request_id, body = request
        fields = () if self.traces is None else (b"CF-Ray: %d-abc" % next(self.traces), b"a: b")
        reported = chat_request(
            request_id=request_id if self.ids else b"", body=body, fields=fields
        )
        self.world.ask(self.world.clients[who], reported)

    def exchange(self, who, request, plan):
        self.like(who, request)
        self.answer(plan)
        for _ in plan[1:]:
            self.more()

    def split(self, who, request, at):
        """Counted from the blank line."""
        at = max(request.index(b"\r\n\r\n") + at, 1)
        self.world.ask(self.world.clients[who], request[:at], request[at:])

    def two(self, who, one, other):
        self.world.ask(self.world.clients[who], one + other)

    def answer(self, plan):
        self.world.answer(*plan)

    def more(self):
        self.world.more()

    def leaves(self, who, how):
        self.world.clients[who].leave(half=how == "half")
        self.world.turn()

    def reads(self, who):
        self.world.clients[who].look()
        self.world.turn()

    def drain(self):
        self.world.dataplane.begin_drain()
        self.world.turn()

    def disable(self, at, how):
        self.change(at, disabled=how)

    def bound(self, at, bound):
        self.change(at, max_inflight=bound)

    def key(self, at):
        if not self.world.dataplane.in_flight:  # else one sent anew may have it or not
            self.change(at, api_key_env="KEY_OF_A_WORKER")

    def change(self, at, **fields):
        if at < len(self.world.entries):
            self.world.change(at, **fields)

    def remove(self):
        if self.world.entries:
            self.world.remove(0)

    def version(self, at, label):
        fleet = self.world.fleet
        for worker in fleet.workers[at : at + 1]:
            fleet.set_version(worker, label, 0)
        self.world.turn()

    def fails(self, at, out):
        fleet = self.world.fleet
        for worker in fleet.workers[at : at + 1]:
            self.world.eject(worker) if out else self.world.blame(worker)

    def wait(self, secs):
        self.world.wait(secs)

    def config(self, more):
        self.world.dataplane.configure(parse(configured(self.server + more, self.routing)))
        self.world.turn()


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(each) for name, each in worker_sockets(tmp_path).items()}


def course(listeners, reported, *, short):
    (server, routing), (slow, at_once, ids, traced), steps = reported
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_loop, "MAX_PENDING_WRITERS", 1 if at_once else 32)
        patch.setenv("KEY_OF_A_WORKER", "secret")
        made = World(listeners, configured(server, routing), short=short)
        with made.at_work() as world:
            made = Course(world, server, routing, ids=ids, traced=traced)
            made.go(slow, steps)
            assert not world.dataplane.loop.tasks
            assert world.dataplane.in_flight == 0
            assert len(world.log) == sum(world.dataplane.services.totals.ended.values())
    return made


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(
        st.tuples(SERVER, ROUTING),
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        st.lists(STEPS, min_size=4, max_size=20),
    )
)
def test_the_fast_path_has_the_results_of_the_slow_path(listeners, reported):
    long, short = (course(listeners, reported, short=short) for short in (False, True))
    for theirs, ours in zip(long.seen, short.seen, strict=True):
        assert ours == theirs
    assert long.world.began == 0
    event(f"began {min(short.world.began // 2 * 2, 10)}")
    event(f"whole {min((short.world.began - short.world.handed_over) // 2 * 2, 10)}")
