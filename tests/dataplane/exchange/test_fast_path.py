"""Each exit of the fast path, by name: the results are those of the slow path."""

import contextlib

import pytest

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.response_relay import diagnostic_fields
from omni_proxy.dataplane.status import connection_record
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.wire.response import DIAGNOSTICS
from tests.dataplane.both_drivers import (
    WHOLE,
    chat_request,
    exchange_once,
    run_fast_and_slow,
    send_request,
    worker_sockets,
)
from tests.fleet.entries import entry, fleet_of


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(each) for name, each in worker_sockets(tmp_path).items()}


def fast_path_counts(world):
    """Exchanges since the caches were filled: begun on the fast path, and handed over."""
    return world.began, world.handed_over


def test_a_request_like_the_last_and_an_answer_like_the_last_never_meet_the_coroutine(listeners):
    def script(world, client):
        for _ in range(5):
            exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=5, handed_over=0)
    assert fast_path_counts(world) == (5, 0)
    assert world.log[-1]["outcome"] == "completed"


UNIQUE = [
    b"traceparent", b"X-Amzn-Trace-Id", b"CF-Ray", b"idempotency-key", b"baggage", b"x-request-id",
    b"x-session-id", b"authorization", b"x-never-heard-of",
]  # fmt: skip


@pytest.mark.parametrize("name", UNIQUE)
@pytest.mark.parametrize("config", ["", "[routing]\nsticky_sessions = true\n"])
def test_a_field_that_is_new_in_every_request_takes_the_fast_path(listeners, name, config):
    def script(world, client):
        for number in range(8):
            world.began = 0 if number == 3 else world.began
            world.ask(client, chat_request(fields=(b"%b: 00-%d" % (name, number), b"accept: a/b")))
            world.answer(WHOLE)
        assert b"%b: 00-7\r\naccept: a/b\r\n" % name in b"".join(end.came for end in world.lines)

    assert fast_path_counts(
        run_fast_and_slow(listeners, script, config, began=5, handed_over=0)
    ) == (5, 0)


HOSTILE_FIELDS = [
    b"x-new: 1\r\n folded", b"x-new: 1\nx: 2", b"x-new: 1\0", b"x-new : 1", b"x-new: \x01",
    b"x-new", b": 1", b"x-new: 1\r\nconnection: close", b"x-new: 1\r\nconnection: x-new",
    b"x-new: 1\r\ntransfer-encoding: chunked", b"x-new: 1\r\ncontent-length: 15",
    b"x-new: 1\r\nx-new: 2", b"X-New: 1", b"x-new:", b"x-new:  1", b"x-new: 1\r\nhost: other",
    b"x-new: \xe9", b"x-new: x-new: 1",
]  # fmt: skip


@pytest.mark.parametrize("field", HOSTILE_FIELDS)
def test_what_stands_in_the_place_of_a_field_that_varies_is_judged(listeners, field):
    def script(world, client):
        for number in range(5):
            world.ask(client, chat_request(fields=(b"x-new: %d" % number, b"accept: a/b")))
            world.answer(WHOLE)
        for each in (field, field, field):
            world.ask(client, chat_request(fields=(each, b"accept: a/b")))
            world.answer(WHOLE)

    run_fast_and_slow(listeners, script, began={2, 3, 5}, handed_over=0)


@pytest.mark.parametrize("size", [4095, 4096, 16000])
def test_complete_bodies_may_be_large(listeners, size):
    text = bytes(b"1" * size)

    def script(world, client):
        world.ask(client, chat_request(body=b'{"messages": [], "x": %b}' % text))
        world.answer(WHOLE[:-6].replace(b": 2", b": %d" % size) + b"\r\n\r\n" + text)

    assert fast_path_counts(run_fast_and_slow(listeners, script, began=1, handed_over=0)) == (1, 0)


SPOOFED = b"".join(b"%b: spoofed\r\n" % name for name in DIAGNOSTICS)


def test_a_workers_own_diagnostics_are_dropped_on_either_way(listeners):
    spoofed = WHOLE.replace(b"content-type", SPOOFED + b"content-type")

    def script(world, client):
        for label in ("", "", "", "v1", "v1", "v1"):
            if label:
                world.fleet.set_version(world.fleet.workers[0], label, 0)
                world.fleet.set_version(world.fleet.workers[1], label, 0)
            world.ask(client, chat_request())
            world.answer(spoofed)

    world = run_fast_and_slow(listeners, script, began=6, handed_over=4)
    assert world.began > world.handed_over
    came = world.clients[0].came.lower()
    assert b"spoofed" not in came
    assert came.count(b"x-omni-weight-version: v1") == 3
    assert came.count(b"x-sglang-omni-worker:") == came.count(b"http/1.1 200") == 12


def test_diagnostic_fields_of_a_worker_are_dropped():
    worker = fleet_of(entry("a")).workers[0]
    exchange = Exchange(0.0, "test")
    exchange.worker, exchange.attempts, exchange.failed_attempts = worker, 2, [(worker, "503")]
    lines = (
        b"".join(diagnostic_fields(exchange))
        + WeightVersion("a", 1).lines
        + WeightVersion("b", 2).end_header_lines(WeightVersion("a", 1))
    )
    written = {line.partition(b":")[0].lower() for line in lines.split(b"\r\n")[:-1]}
    assert written == set(DIAGNOSTICS)


def test_the_tokens_that_a_response_reports_are_counted(listeners):
    reported = b'{"usage": {"prompt_tokens": 7, "completion_tokens": 5}}'

    def script(world, client):
        for text in (reported, reported, b"{}"):
            world.ask(client, chat_request())
            world.answer(WHOLE[:-6].replace(b": 2", b": %d" % len(text)) + b"\r\n\r\n" + text)

    world = run_fast_and_slow(listeners, script, "usage_metrics = true\n", began=3, handed_over=0)
    assert fast_path_counts(world) == (3, 0)
    assert sum(sum(cell.tokens.values()) for cell in world.meters.series.values()) == 24


@pytest.mark.parametrize(
    "request_of",
    [
        chat_request(turned=True),
        chat_request(b"Content-Length"),
        chat_request(request_id=b"new"),
        chat_request(fields=(b"expect: 100-continue",)),
        chat_request(body=b'{"messages": "%b"}' % (b"x" * 20000)),
        chat_request(length=b"016"),
        chat_request(length=b"15"),
        chat_request(length=b"17"),
        chat_request(body=b"{"),
        b"\r\n" + chat_request(),
        chat_request() + chat_request(),
        chat_request() + b"POST",
    ],
    ids=lambda sent: sent[:12] + b"..." + sent[37:80],
)
def test_whatever_is_not_like_the_last_misses(listeners, request_of):
    def script(world, client):
        world.ask(client, request_of)
        world.answer(WHOLE)
        world.answer(WHOLE)

    assert fast_path_counts(run_fast_and_slow(listeners, script, began=0, handed_over=0)) == (0, 0)


@pytest.mark.parametrize("at", range(1, len(chat_request()), 7))
def test_a_request_in_two_pieces_misses(listeners, at):
    def script(world, client):
        world.ask(client, chat_request()[:at], chat_request()[at:])
        world.answer(WHOLE)

    assert fast_path_counts(run_fast_and_slow(listeners, script, began=0, handed_over=0)) == (0, 0)


@pytest.mark.parametrize(
    "more",
    [b"\r\n\r\n", b"\r\nx-more: 1\r\n\r\n", b"\r\nx: 1\r\n\r\n\r\n"],
)
def test_a_head_without_its_blank_line_is_no_head_yet(listeners, more):
    def script(world, client):
        world.ask(client, chat_request(body=b"").removesuffix(b"\r\n\r\n"))
        assert not world.dataplane.in_flight
        world.ask(client, more)
        world.answer(WHOLE)

    run_fast_and_slow(listeners, script, began=0, handed_over=0)


def test_an_id_cut_in_the_middle_is_not_the_id(listeners):
    last = {"turned": True, "body": b""}
    request = chat_request(**last, fields=(b"traceparent: 00-abcdef",))
    lines = request.removesuffix(b"\r\n\r\n").split(b"\r\n")
    head = b"\r\n".join([*sorted(lines[1:]), b""]).removesuffix(b"\r\n")
    assert head.endswith(b"traceparent: 00-abcdef")
    head = lines[0] + b"\r\n" + head

    def script(world, client):
        for _ in range(4):
            world.ask(client, head + b"\r\n\r\n")
            world.answer(WHOLE)
        world.began = 0
        world.ask(client, head[:-3])
        assert not world.dataplane.in_flight
        world.ask(client, head[-3:] + b"\r\n\r\n")
        world.answer(WHOLE)

    assert run_fast_and_slow(listeners, script, began=0, handed_over=0).began == 0


def test_without_an_idle_connection_the_coroutine_dials(listeners):
    def script(world, client):
        for end in world.idle_ends():
            end.close()
        world.turn()
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=0, handed_over=1)
    assert (world.handed_over, len(world.lines), world.log[-1]["status"]) == (1, 3, 200)


@pytest.mark.parametrize("config", ["", "queue_size = 2\n"], ids=["refused", "waits"])
def test_without_a_routable_worker_it_is_refused_or_waits(listeners, config):
    def script(world, client):
        for at in range(2):
            world.change(at, disabled=True)
        world.ask(client, chat_request())
        world.change(1, disabled=False)
        world.answer(WHOLE)

    world = run_fast_and_slow(listeners, script, config, began=0, handed_over=1)
    assert world.log[-1]["status"] == (200 if config else 503)
    assert world.handed_over == 1


@pytest.mark.parametrize("config", ["queue_size = 2\n", "queue_size = 2\nhalf_close = 'answer'\n"])
def test_without_a_slot_it_waits_for_one(listeners, config):
    def script(world, client):
        other = world.connect_client()
        send_request(world, other)
        world.ask(client, chat_request())
        assert sorted(world.phases) == ["queue", "wait"]
        world.answer(WHOLE)
        world.answer(WHOLE)

    world = run_fast_and_slow(
        listeners, script, f"max_inflight = 1\n{config}", began=0, handed_over=0
    )
    assert [each["status"] for each in world.log[-2:]] == [200, 200]


def test_time_in_the_queue_for_a_slot_is_no_time_of_the_exchange(listeners):
    def script(world, client):
        send_request(
            world, world.connect_client(), chat_request(body=b'{"messages": [], "stream": true}')
        )
        world.ask(client, chat_request())
        world.wait(4)
        world.answer(WHOLE)
        world.wait(4)
        world.answer(WHOLE)

    config = "max_inflight = 1\nqueue_size = 2\nrequest_timeout_secs = 5\n"
    assert (
        run_fast_and_slow(listeners, script, config, began=0, handed_over=0).log[-1]["status"]
        == 200
    )


def test_without_a_slot_and_a_queue_it_is_refused(listeners):
    def script(world, client):
        send_request(world, world.connect_client())
        world.ask(client, chat_request())
        world.answer(WHOLE)

    world = run_fast_and_slow(listeners, script, "max_inflight = 1\n", began=0, handed_over=0)
    assert sorted(each["status"] for each in world.log[-2:]) == [200, 503]
    assert world.dataplane.inflight.rejected == 1


def test_a_key_of_the_workers_own_is_sent(listeners, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def script(world, client):
        for at in range(2):
            world.change(at, api_key_env="KEY_OF_A_WORKER")
        for field in (b"x-api-key: theirs", b"authorization: Bearer theirs"):
            for number in range(6):
                world.ask(client, chat_request(fields=(b"%b-%d" % (field, number),)))
                world.answer(WHOLE)

    world = run_fast_and_slow(listeners, script, began=6, handed_over=0)
    came = b"".join(end.came for end in world.lines)
    assert came.count(b"authorization: Bearer secret\r\n") == 12
    assert b"theirs" not in came


@pytest.mark.parametrize(
    "reported",
    [
        WHOLE.replace(b"200 OK", b"404 Not Found"),
        *[WHOLE.replace(b"200 OK", b"%d Oh" % status) for status in (500, 502, 503, 504)],
        WHOLE.replace(b"application/json", b"text/event-stream"),
        WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        WHOLE.replace(b"\r\n\r\n", b"\r\ndate: now\r\n\r\n"),
    ],
    ids=lambda reported: (
        reported[9:12].decode() + reported[31:48].decode() + reported[60:75].decode()
    ),
)
def test_a_repeated_response_is_relayed_like_the_first(listeners, reported):
    def script(world, client):
        for _ in range(8):
            world.ask(client, chat_request())
            world.answer(reported)

    config = "[routing]\nmax_total_retries = 1\nmax_worker_retries = 0\n[health]\n"
    run_fast_and_slow(
        listeners, script, f"{config}failure_threshold = 99\n", began={2, 6, 8}, handed_over={4, 8}
    )


@pytest.mark.parametrize("message", [1, 3], ids=["less", "more"])
def test_a_response_of_another_length_than_declared(listeners, message):
    def script(world, client):
        send_request(world, client)
        world.answer(WHOLE.replace(b": 2", b": %d" % message), b" ")
        world.more()
        exchange_once(world, client)

    run_fast_and_slow(listeners, script, began=2, handed_over=1)


def test_the_ids_of_clients_are_kept(listeners):
    def script(world, client):
        for number in range(6):
            send_request(world, client, chat_request(request_id=b"id-%d" % number))
            world.answer(WHOLE)
        reported = [each["request_id"] for each in world.log[-6:]]
        assert reported == [f"id-{number}" for number in range(6)]

    assert run_fast_and_slow(listeners, script, began=4, handed_over=0).began >= 4


def test_a_good_answer_makes_good_for_a_failed_one(listeners):
    def script(world, client):
        for worker in world.fleet.workers:
            world.blame(worker)
        exchange_once(world, client)
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=2, handed_over=2)
    assert [worker.health.failed_requests for worker in world.fleet.workers] == [0, 0]


def test_a_trial_that_went_well_brings_its_worker_back(listeners):
    def script(world, client):
        for worker in world.fleet.workers:
            world.eject(worker)
        exchange_once(world, client)
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=2, handed_over=2)
    assert not any(worker.health.breaker_tripped for worker in world.fleet.workers)


def test_new_weights_during_the_wait_are_reported(listeners):
    def script(world, client):
        send_request(world, client)
        for worker in world.fleet.workers:
            world.fleet.set_version(worker, "new", 2)
        world.answer(WHOLE)
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=2, handed_over=1)
    assert world.clients[0].came.count(b"x-omni-weight-version: new\r\n") == 1


def test_an_exchange_is_shown_in_the_connection_record(listeners):
    def script(world, client):
        send_request(world, client)
        assert connection_record(client.connection)["target"] == "/v1/chat/completions"
        assert connection_record(client.connection)["worker"].startswith("unix:")

    run_fast_and_slow(listeners, script, began=1, handed_over=0)


def test_clients_that_are_known_stay_with_their_worker(listeners):
    def script(world, client):
        keyed = chat_request(fields=(b"x-session-id: me",))
        for _ in range(7):
            send_request(world, client, keyed)
            world.answer(WHOLE)
        assert len({each["worker"] for each in world.log[-7:]}) == 1

    world = run_fast_and_slow(
        listeners, script, "[routing]\nsticky_sessions = true\n", began=5, handed_over=0
    )
    assert world.began >= 4


@pytest.mark.parametrize("key", ["sse_keepalive_secs = 5", "max_payload_size = 100",
                                 "request_id_header = 'x-request-id'"])  # fmt: skip
def test_what_the_fast_path_does_not_support_takes_the_slow_path(listeners, key):
    world = run_fast_and_slow(
        listeners,
        lambda world, client: exchange_once(world, client),
        f"{key}\n",
        began=0,
        handed_over=0,
    )
    assert fast_path_counts(world) == (0, 0)
