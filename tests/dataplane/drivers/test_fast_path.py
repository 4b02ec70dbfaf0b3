"""Every case in which an exchange leaves the fast path: the results are those of the slow path."""

import contextlib

import pytest

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.relay.response_relay import diagnostic_fields
from omni_proxy.dataplane.status import connection_record
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.wire.header_fields import DIAGNOSTICS
from tests.dataplane.both_drivers import (
    OK_RESPONSE,
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
        yield {name: stack.enter_context(sock) for name, sock in worker_sockets(tmp_path).items()}


def fast_path_counts(world):
    """Exchanges since the caches were filled: begun on the fast path, and handed over."""
    return world.began, world.handed_over


def test_repeated_requests_and_responses_stay_on_the_fast_path(listeners):
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
            world.client_sends(
                client, chat_request(fields=(b"%b: 00-%d" % (name, number), b"accept: a/b"))
            )
            world.worker_responds(OK_RESPONSE)
        assert b"%b: 00-7\r\naccept: a/b\r\n" % name in b"".join(
            connection.received for connection in world.worker_connections
        )

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
def test_a_hostile_field_in_place_of_a_varying_one_is_not_accepted(listeners, field):
    def script(world, client):
        for number in range(5):
            world.client_sends(client, chat_request(fields=(b"x-new: %d" % number, b"accept: a/b")))
            world.worker_responds(OK_RESPONSE)
        for _ in range(3):
            world.client_sends(client, chat_request(fields=(field, b"accept: a/b")))
            world.worker_responds(OK_RESPONSE)

    run_fast_and_slow(listeners, script, began={2, 3, 5}, handed_over=0)


@pytest.mark.parametrize("size", [4095, 4096, 16000])
def test_large_complete_bodies_take_the_fast_path(listeners, size):
    text = bytes(b"1" * size)

    def script(world, client):
        world.client_sends(client, chat_request(body=b'{"messages": [], "x": %b}' % text))
        world.worker_responds(OK_RESPONSE[:-6].replace(b": 2", b": %d" % size) + b"\r\n\r\n" + text)

    assert fast_path_counts(run_fast_and_slow(listeners, script, began=1, handed_over=0)) == (1, 0)


SPOOFED = b"".join(b"%b: spoofed\r\n" % name for name in DIAGNOSTICS)


def test_a_workers_own_diagnostic_fields_are_dropped_on_both_paths(listeners):
    spoofed = OK_RESPONSE.replace(b"content-type", SPOOFED + b"content-type")

    def script(world, client):
        for label in ("", "", "", "v1", "v1", "v1"):
            if label:
                world.fleet.set_version(world.fleet.workers[0], label, 0)
                world.fleet.set_version(world.fleet.workers[1], label, 0)
            world.client_sends(client, chat_request())
            world.worker_responds(spoofed)

    world = run_fast_and_slow(listeners, script, began=6, handed_over=4)
    assert world.began > world.handed_over
    received = world.clients[0].received.lower()
    assert b"spoofed" not in received
    assert received.count(b"x-omni-weight-version: v1") == 3
    assert received.count(b"x-sglang-omni-worker:") == received.count(b"http/1.1 200") == 12


def test_every_diagnostic_field_of_the_proxy_is_in_diagnostics():
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


def test_the_usage_of_a_response_is_counted_on_the_fast_path(listeners):
    usage = b'{"usage": {"prompt_tokens": 7, "completion_tokens": 5}}'

    def script(world, client):
        for text in (usage, usage, b"{}"):
            world.client_sends(client, chat_request())
            world.worker_responds(
                OK_RESPONSE[:-6].replace(b": 2", b": %d" % len(text)) + b"\r\n\r\n" + text
            )

    world = run_fast_and_slow(listeners, script, "usage_metrics = true\n", began=3, handed_over=0)
    assert fast_path_counts(world) == (3, 0)
    assert sum(sum(cell.tokens.values()) for cell in world.meters.series.values()) == 24


@pytest.mark.parametrize(
    "request_bytes",
    [
        chat_request(reversed_fields=True),
        chat_request(b"Content-Length"),
        chat_request(request_id=b"new"),
        chat_request(fields=(b"expect: 100-continue",)),
        chat_request(body=b'{"messages": "%b"}' % (b"x" * 20000)),
        chat_request(length=b"016"),
        chat_request(length=b"15"),
        chat_request(length=b"17"),
        chat_request(body=b"{"),
        chat_request(body=b'[{"messages": 1}]'),
        chat_request(body=b'"messages of 16"'),
        chat_request(body=b"1"),
        b"\r\n" + chat_request(),
        chat_request() + chat_request(),
        chat_request() + b"POST",
    ],
    ids=lambda sent: sent[:12] + b"..." + sent[37:80],
)
def test_a_request_unlike_the_previous_ones_misses_the_fast_path(listeners, request_bytes):
    def script(world, client):
        world.client_sends(client, request_bytes)
        world.worker_responds(OK_RESPONSE)
        world.worker_responds(OK_RESPONSE)

    assert fast_path_counts(run_fast_and_slow(listeners, script, began=0, handed_over=0)) == (0, 0)


@pytest.mark.parametrize(
    "request_bytes",
    [
        chat_request(fields=(b'x-metadata: {"tier": 1}',)),
        chat_request(body=b' {"messages": []}'),
        chat_request(body=b'\r\n\r\n{"messages": []}'),
    ],
)
def test_the_first_brace_need_not_begin_the_body(listeners, request_bytes):
    def script(world, client):
        for number in range(8):
            world.began = 0 if number == 3 else world.began
            world.client_sends(client, request_bytes)
            world.worker_responds(OK_RESPONSE)

    assert fast_path_counts(run_fast_and_slow(listeners, script, began=5, handed_over=0)) == (5, 0)


@pytest.mark.parametrize("at", range(1, len(chat_request()), 7))
def test_a_request_in_two_pieces_misses_the_fast_path(listeners, at):
    def script(world, client):
        world.client_sends(client, chat_request()[:at], chat_request()[at:])
        world.worker_responds(OK_RESPONSE)

    assert fast_path_counts(run_fast_and_slow(listeners, script, began=0, handed_over=0)) == (0, 0)


@pytest.mark.parametrize(
    "rest",
    [b"\r\n\r\n", b"\r\nx-more: 1\r\n\r\n", b"\r\nx: 1\r\n\r\n\r\n"],
)
def test_a_head_without_its_blank_line_is_incomplete(listeners, rest):
    def script(world, client):
        world.client_sends(client, chat_request(body=b"").removesuffix(b"\r\n\r\n"))
        assert not world.dataplane.in_flight
        world.client_sends(client, rest)
        world.worker_responds(OK_RESPONSE)

    run_fast_and_slow(listeners, script, began=0, handed_over=0)


def test_a_head_cut_within_its_last_value_is_incomplete(listeners):
    request = chat_request(reversed_fields=True, body=b"", fields=(b"traceparent: 00-abcdef",))
    lines = request.removesuffix(b"\r\n\r\n").split(b"\r\n")
    head = b"\r\n".join([*sorted(lines[1:]), b""]).removesuffix(b"\r\n")
    assert head.endswith(b"traceparent: 00-abcdef")
    head = lines[0] + b"\r\n" + head

    def script(world, client):
        for _ in range(4):
            world.client_sends(client, head + b"\r\n\r\n")
            world.worker_responds(OK_RESPONSE)
        world.began = 0
        world.client_sends(client, head[:-3])
        assert not world.dataplane.in_flight
        world.client_sends(client, head[-3:] + b"\r\n\r\n")
        world.worker_responds(OK_RESPONSE)

    assert run_fast_and_slow(listeners, script, began=0, handed_over=0).began == 0


def test_without_an_idle_connection_the_coroutine_connects(listeners):
    def script(world, client):
        for connection in world.idle_connections():
            connection.close()
        world.run_until_idle()
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=0, handed_over=1)
    assert (world.handed_over, len(world.worker_connections), world.log[-1]["status"]) == (
        1,
        3,
        200,
    )


@pytest.mark.parametrize("config", ["", "queue_size = 2\n"], ids=["refused", "waits"])
def test_without_a_routable_worker_a_request_is_rejected_or_waits(listeners, config):
    def script(world, client):
        for at in range(2):
            world.change_worker(at, disabled=True)
        world.client_sends(client, chat_request())
        world.change_worker(1, disabled=False)
        world.worker_responds(OK_RESPONSE)

    world = run_fast_and_slow(listeners, script, config, began=0, handed_over=1)
    assert world.log[-1]["status"] == (200 if config else 503)
    assert world.handed_over == 1


@pytest.mark.parametrize("config", ["queue_size = 2\n", "queue_size = 2\nhalf_close = 'answer'\n"])
def test_without_a_slot_a_request_waits_for_one(listeners, config):
    def script(world, client):
        other = world.connect_client()
        send_request(world, other)
        world.client_sends(client, chat_request())
        assert sorted(world.phases) == ["queue", "wait"]
        world.worker_responds(OK_RESPONSE)
        world.worker_responds(OK_RESPONSE)

    world = run_fast_and_slow(
        listeners, script, f"max_inflight = 1\n{config}", began=0, handed_over=0
    )
    assert [line["status"] for line in world.log[-2:]] == [200, 200]


def test_the_time_in_the_queue_for_a_slot_does_not_count_for_the_timeout(listeners):
    def script(world, client):
        send_request(
            world, world.connect_client(), chat_request(body=b'{"messages": [], "stream": true}')
        )
        world.client_sends(client, chat_request())
        world.wait(4)
        world.worker_responds(OK_RESPONSE)
        world.wait(4)
        world.worker_responds(OK_RESPONSE)

    config = "max_inflight = 1\nqueue_size = 2\nrequest_timeout_secs = 5\n"
    assert (
        run_fast_and_slow(listeners, script, config, began=0, handed_over=0).log[-1]["status"]
        == 200
    )


def test_without_a_slot_and_a_queue_a_request_is_rejected(listeners):
    def script(world, client):
        send_request(world, world.connect_client())
        world.client_sends(client, chat_request())
        world.worker_responds(OK_RESPONSE)

    world = run_fast_and_slow(listeners, script, "max_inflight = 1\n", began=0, handed_over=0)
    assert sorted(line["status"] for line in world.log[-2:]) == [200, 503]
    assert world.dataplane.inflight.rejected == 1


def test_a_workers_own_key_is_sent(listeners, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def script(world, client):
        for at in range(2):
            world.change_worker(at, api_key_env="KEY_OF_A_WORKER")
        for field in (b"x-api-key: client-key", b"authorization: Bearer client-key"):
            for number in range(6):
                world.client_sends(client, chat_request(fields=(b"%b-%d" % (field, number),)))
                world.worker_responds(OK_RESPONSE)

    world = run_fast_and_slow(listeners, script, began=6, handed_over=0)
    sent = b"".join(connection.received for connection in world.worker_connections)
    assert sent.count(b"authorization: Bearer secret\r\n") == 12
    assert b"client-key" not in sent


@pytest.mark.parametrize(
    "response",
    [
        OK_RESPONSE.replace(b"200 OK", b"404 Not Found"),
        *[OK_RESPONSE.replace(b"200 OK", b"%d Oh" % status) for status in (500, 502, 503, 504)],
        OK_RESPONSE.replace(b"application/json", b"text/event-stream"),
        OK_RESPONSE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        OK_RESPONSE.replace(b"\r\n\r\n", b"\r\ndate: now\r\n\r\n"),
    ],
    ids=lambda response: (
        response[9:12].decode() + response[31:48].decode() + response[60:75].decode()
    ),
)
def test_a_repeated_response_is_relayed_like_the_first(listeners, response):
    def script(world, client):
        for _ in range(8):
            world.client_sends(client, chat_request())
            world.worker_responds(response)

    config = "[routing]\nmax_total_retries = 1\nmax_worker_retries = 0\n[health]\n"
    run_fast_and_slow(
        listeners, script, f"{config}failure_threshold = 99\n", began={2, 6, 8}, handed_over={4, 8}
    )


@pytest.mark.parametrize("length", [1, 3], ids=["less", "more"])
def test_a_response_that_is_shorter_or_longer_than_declared(listeners, length):
    def script(world, client):
        send_request(world, client)
        world.worker_responds(OK_RESPONSE.replace(b": 2", b": %d" % length), b" ")
        world.worker_continues()
        exchange_once(world, client)

    run_fast_and_slow(listeners, script, began=2, handed_over=1)


def test_request_ids_of_clients_are_kept(listeners):
    def script(world, client):
        for number in range(6):
            send_request(world, client, chat_request(request_id=b"id-%d" % number))
            world.worker_responds(OK_RESPONSE)
        logged = [line["request_id"] for line in world.log[-6:]]
        assert logged == [f"id-{number}" for number in range(6)]

    assert run_fast_and_slow(listeners, script, began=4, handed_over=0).began >= 4


def test_a_successful_response_resets_the_failure_count(listeners):
    def script(world, client):
        for worker in world.fleet.workers:
            world.record_failure(worker)
        exchange_once(world, client)
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=2, handed_over=2)
    assert [worker.health.failed_requests for worker in world.fleet.workers] == [0, 0]


def test_a_successful_half_open_request_closes_the_breaker(listeners):
    def script(world, client):
        for worker in world.fleet.workers:
            world.eject(worker)
        exchange_once(world, client)
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=2, handed_over=2)
    assert not any(worker.health.breaker_tripped for worker in world.fleet.workers)


def test_new_weights_before_the_response_are_reported(listeners):
    def script(world, client):
        send_request(world, client)
        for worker in world.fleet.workers:
            world.fleet.set_version(worker, "new", 2)
        world.worker_responds(OK_RESPONSE)
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=2, handed_over=1)
    assert world.clients[0].received.count(b"x-omni-weight-version: new\r\n") == 1


def test_an_exchange_is_shown_in_the_connection_record(listeners):
    def script(world, client):
        send_request(world, client)
        assert connection_record(client.connection)["target"] == "/v1/chat/completions"
        assert connection_record(client.connection)["worker"].startswith("unix:")

    run_fast_and_slow(listeners, script, began=1, handed_over=0)


def test_requests_with_an_affinity_key_stay_with_their_worker(listeners):
    def script(world, client):
        keyed = chat_request(fields=(b"x-session-id: me",))
        for _ in range(7):
            send_request(world, client, keyed)
            world.worker_responds(OK_RESPONSE)
        assert len({line["worker"] for line in world.log[-7:]}) == 1

    world = run_fast_and_slow(
        listeners, script, "[routing]\nsticky_sessions = true\n", began=5, handed_over=0
    )
    assert world.began >= 4


@pytest.mark.parametrize("key", ["sse_keepalive_secs = 5", "max_payload_size = 100",
                                 "request_id_header = 'x-request-id'"])  # fmt: skip
def test_unsupported_settings_take_the_slow_path(listeners, key):
    world = run_fast_and_slow(
        listeners,
        lambda world, client: exchange_once(world, client),
        f"{key}\n",
        began=0,
        handed_over=0,
    )
    assert fast_path_counts(world) == (0, 0)
