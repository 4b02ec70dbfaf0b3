"""The engine's load in the head of a response, with and without the fast path."""

import contextlib

import pytest

from tests.dataplane.both_drivers import (
    OK_RESPONSE,
    chat_request,
    run_fast_and_slow,
    worker_sockets,
)

ON = "[routing]\noverload_waiting = 8\n"
LOAD_REQUEST = b"endpoint-load-metrics-format: JSON\r\n"


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(sock) for name, sock in worker_sockets(tmp_path).items()}


def response_with_load(load):
    return OK_RESPONSE.replace(b"\r\n\r\n", b"\r\nendpoint-load-metrics: %b\r\n\r\n" % load)


def json_load(waiting):
    return (
        b'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": %d.0}}'
        % waiting
    )


def test_the_load_of_each_response_is_read_and_removed(listeners):
    def script(world, client):
        for waiting in range(6):
            world.client_sends(client, chat_request())
            world.worker_responds(response_with_load(json_load(waiting)))

    world = run_fast_and_slow(listeners, script, ON, began=6, handed_over=0)
    assert (world.began, world.handed_over) == (6, 0)
    sent = b"".join(connection.received for connection in world.worker_connections)
    assert sent.count(LOAD_REQUEST) == sent.count(b"POST ")
    assert b"endpoint-load" not in world.clients[0].received.lower()
    waiting = {worker.engine_load.report.waiting for worker in world.fleet.workers}
    assert waiting == {4.0, 5.0}  # the last report of each worker


def test_an_overloaded_worker_gets_no_request_until_its_report_is_stale(listeners):
    def script(world, client):
        for _ in range(2):
            world.client_sends(client, chat_request())
            world.worker_responds(response_with_load(json_load(0)))
        world.client_sends(client, chat_request())
        world.worker_responds(response_with_load(json_load(8)))
        before = [worker.routed["generation"] for worker in world.fleet.workers]
        for _ in range(4):
            world.client_sends(client, chat_request())
            world.worker_responds(response_with_load(json_load(0)))
        after = [worker.routed["generation"] for worker in world.fleet.workers]
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 4]
        world.wait(6)
        for _ in range(2):
            world.client_sends(client, chat_request())
            world.worker_responds(OK_RESPONSE)
        last = [worker.routed["generation"] for worker in world.fleet.workers]
        assert [b - a for a, b in zip(after, last, strict=True)] == [1, 1]

    run_fast_and_slow(listeners, script, ON, began=9, handed_over={0, 1, 2, 3, 4})


@pytest.mark.parametrize("client_format", [b"TEXT", b"JSON"])
def test_a_client_that_requests_the_load_gets_it_in_its_format(listeners, client_format):
    load = b"TEXT named_metrics.num_requests_waiting=9.0, named_metrics.kv_cache_usage_perc=0.1"
    field = b"Endpoint-Load-Metrics-Format: " + client_format

    def script(world, client):
        for _ in range(4):
            world.client_sends(client, chat_request(fields=(field,)))
            world.worker_responds(response_with_load(load))

    world = run_fast_and_slow(listeners, script, ON, began=0, handed_over=0)
    received = world.clients[0].received
    assert received.count(b"endpoint-load-metrics: " + load + b"\r\n") == 4
    sent = b"".join(connection.received for connection in world.worker_connections)
    assert sent.count(field) == 4
    assert sent.lower().count(b"endpoint-load-metrics-format") == sent.count(b"POST ")
    assert {worker.engine_load.report.waiting for worker in world.fleet.workers} == {9.0}


def test_without_a_limit_no_load_is_requested_and_reports_are_forwarded(listeners):
    def script(world, client):
        for waiting in range(4):
            world.client_sends(client, chat_request())
            world.worker_responds(response_with_load(json_load(waiting)))

    world = run_fast_and_slow(listeners, script, began=4, handed_over={0, 4})
    assert world.clients[0].received.count(b"endpoint-load-metrics: JSON") == 4
    assert b"endpoint-load" not in b"".join(
        connection.received for connection in world.worker_connections
    )
    assert {worker.engine_load for worker in world.fleet.workers} == {None}


@pytest.mark.parametrize(
    "load", [b"JSON {", b"", b"JSON " + b"x" * 5000, b"\xff", b"TEXT named_metrics.x=1"]
)
def test_an_invalid_load_is_ignored_and_removed(listeners, load):
    def script(world, client):
        for _ in range(4):
            world.client_sends(client, chat_request())
            world.worker_responds(response_with_load(load))

    world = run_fast_and_slow(listeners, script, ON, began=4, handed_over=0)
    assert world.clients[0].received.count(b"200 OK") == 4 + 6  # 6 fill the caches
    assert b"endpoint-load" not in world.clients[0].received
    assert {worker.engine_load for worker in world.fleet.workers} == {None}


def test_another_spelling_of_the_field_is_removed_too(listeners):
    def script(world, client):
        for _ in range(4):
            world.client_sends(client, chat_request())
            world.worker_responds(
                response_with_load(json_load(1)).replace(b"endpoint-load", b"Endpoint-Load")
            )

    world = run_fast_and_slow(listeners, script, ON, began=4, handed_over=4)
    assert b"endpoint-load" not in world.clients[0].received.lower()
    assert {worker.engine_load.report.waiting for worker in world.fleet.workers} == {1.0}
