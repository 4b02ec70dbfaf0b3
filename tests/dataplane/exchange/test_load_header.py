"""The engine's load in the head of a response, on the fast path and on the slow one."""

import contextlib

import pytest

from tests.dataplane.both_drivers import (
    WHOLE,
    chat_request,
    run_fast_and_slow,
    worker_sockets,
)

ON = "[routing]\noverload_waiting = 8\n"
ASKS = b"endpoint-load-metrics-format: JSON\r\n"


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(each) for name, each in worker_sockets(tmp_path).items()}


def answer_with(load):
    return WHOLE.replace(b"\r\n\r\n", b"\r\nendpoint-load-metrics: %b\r\n\r\n" % load)


def json_load(waiting):
    return (
        b'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": %d.0}}'
        % waiting
    )


def test_each_response_reports_a_load_and_the_client_gets_none(listeners):
    def script(world, client):
        for waiting in range(6):
            world.ask(client, chat_request())
            world.answer(answer_with(json_load(waiting)))

    world = run_fast_and_slow(listeners, script, ON, began=6, handed_over=0)
    assert (world.began, world.handed_over) == (6, 0)
    asked = b"".join(end.came for end in world.lines)
    assert asked.count(ASKS) == asked.count(b"POST ")
    assert b"endpoint-load" not in world.clients[0].came.lower()
    waiting = {worker.engine_load.report.waiting for worker in world.fleet.workers}
    assert waiting == {4.0, 5.0}  # the last of each, in turns


def test_a_worker_that_reports_too_much_gets_no_request_until_it_is_old(listeners):
    def script(world, client):
        for _ in range(2):
            world.ask(client, chat_request())
            world.answer(answer_with(json_load(0)))
        world.ask(client, chat_request())
        world.answer(answer_with(json_load(8)))
        before = [worker.routed["generation"] for worker in world.fleet.workers]
        for _ in range(4):
            world.ask(client, chat_request())
            world.answer(answer_with(json_load(0)))
        after = [worker.routed["generation"] for worker in world.fleet.workers]
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 4]
        world.wait(6)
        for _ in range(2):
            world.ask(client, chat_request())
            world.answer(WHOLE)
        last = [worker.routed["generation"] for worker in world.fleet.workers]
        assert [b - a for a, b in zip(after, last, strict=True)] == [1, 1]

    run_fast_and_slow(listeners, script, ON, began=9, handed_over={0, 1, 2, 3, 4})


@pytest.mark.parametrize("asked", [b"TEXT", b"JSON"])
def test_a_client_that_asks_gets_the_load_in_its_own_format(listeners, asked):
    reported = b"TEXT named_metrics.num_requests_waiting=9.0, named_metrics.kv_cache_usage_perc=0.1"
    field = b"Endpoint-Load-Metrics-Format: " + asked

    def script(world, client):
        for _ in range(4):
            world.ask(client, chat_request(fields=(field,)))
            world.answer(answer_with(reported))

    world = run_fast_and_slow(listeners, script, ON, began=0, handed_over=0)
    got = world.clients[0].came
    assert got.count(b"endpoint-load-metrics: " + reported + b"\r\n") == 4
    sent = b"".join(end.came for end in world.lines)
    assert sent.count(field) == 4
    assert sent.lower().count(b"endpoint-load-metrics-format") == sent.count(b"POST ")
    assert {worker.engine_load.report.waiting for worker in world.fleet.workers} == {9.0}


def test_without_a_bound_nothing_is_asked_and_what_comes_is_passed_on(listeners):
    def script(world, client):
        for waiting in range(4):
            world.ask(client, chat_request())
            world.answer(answer_with(json_load(waiting)))

    world = run_fast_and_slow(listeners, script, began=4, handed_over={0, 4})
    assert world.clients[0].came.count(b"endpoint-load-metrics: JSON") == 4
    assert b"endpoint-load" not in b"".join(end.came for end in world.lines)
    assert {worker.engine_load for worker in world.fleet.workers} == {None}


@pytest.mark.parametrize(
    "load", [b"JSON {", b"", b"JSON " + b"x" * 5000, b"\xff", b"TEXT named_metrics.x=1"]
)
def test_garbage_reports_nothing_and_does_not_reach_the_client(listeners, load):
    def script(world, client):
        for _ in range(4):
            world.ask(client, chat_request())
            world.answer(answer_with(load))

    world = run_fast_and_slow(listeners, script, ON, began=4, handed_over=0)
    assert world.clients[0].came.count(b"200 OK") == 4 + 6  # and those that fill the caches
    assert b"endpoint-load" not in world.clients[0].came
    assert {worker.engine_load for worker in world.fleet.workers} == {None}


def test_another_spelling_of_the_field_is_taken_out_as_well(listeners):
    def script(world, client):
        for _ in range(4):
            world.ask(client, chat_request())
            world.answer(answer_with(json_load(1)).replace(b"endpoint-load", b"Endpoint-Load"))

    world = run_fast_and_slow(listeners, script, ON, began=4, handed_over=4)
    assert b"endpoint-load" not in world.clients[0].came.lower()
    assert {worker.engine_load.report.waiting for worker in world.fleet.workers} == {1.0}
