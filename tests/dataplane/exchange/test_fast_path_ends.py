"""What ends an exchange of the fast path before or after its response: nothing is left over."""

import contextlib
import logging
import socket

import pytest

from omni_proxy.dataplane.loop import event_loop
from tests.dataplane.both_drivers import (
    WHOLE,
    World,
    chat_request,
    exchange_once,
    run_fast_and_slow,
    send_request,
    worker_sockets,
)

CLOSES = None


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(each) for name, each in worker_sockets(tmp_path).items()}


@pytest.fixture
def world(listeners):
    """The fast path alone, and a client of it."""
    with World(listeners).at_work() as made:
        made.dataplane.settings.access_log_is_json = True
        made.connect_client(warm=6)
        made.began = made.handed_over = 0
        yield made


@pytest.mark.parametrize("half_close", ["abort", "answer"])
@pytest.mark.parametrize("half", [False, True])
def test_a_client_that_leaves_while_it_waits(listeners, half_close, half):
    def script(world, client):
        send_request(world, client)
        client.leave(half=half)
        world.turn()
        world.answer(WHOLE)

    world = run_fast_and_slow(
        listeners, script, f"half_close = '{half_close}'\n", began=1, handed_over=0
    )
    served = half and half_close == "answer"
    assert world.log[-1]["outcome"] == ("completed" if served else "client_disconnected")
    assert len(world.log) == 7


@pytest.mark.parametrize("half_close", ["abort", "answer"])
def test_a_client_that_ends_its_side_along_with_its_request(listeners, half_close):
    def script(world, client):
        client.sock.sendall(chat_request())
        client.leave(half=True)
        world.turn()
        world.answer(WHOLE)

    world = run_fast_and_slow(
        listeners, script, f"half_close = '{half_close}'\n", began=0, handed_over=0
    )
    served = half_close == "answer"
    assert world.log[-1]["outcome"] == ("completed" if served else "client_disconnected")


@pytest.mark.parametrize("total", [0, 5])
def test_an_expired_timeout_is_a_504_and_reported_to_health(listeners, total):
    def script(world, client):
        send_request(world, client)
        limits = world.dataplane.settings.limits
        world.wait(limits.total + 1 if total else limits.response_head + 1)

    world = run_fast_and_slow(
        listeners, script, f"request_timeout_secs = {total}\n", began=1, handed_over=1
    )
    assert (world.log[-1]["status"], world.log[-1]["error"]) == (504, "response_timeout")
    assert sum(worker.health.failed_requests for worker in world.fleet.workers) == 1


def test_an_event_loop_that_ends_finalizes_each_exchange_once(listeners):
    def script(world, client):
        send_request(world, client)
        for task in list(world.dataplane.loop.tasks):
            task.close_coroutine()
        world.turn()

    world = run_fast_and_slow(listeners, script, began=1, handed_over=0)
    assert (world.log[-1]["outcome"], len(world.log)) == ("cut_by_proxy", 7)


@pytest.mark.parametrize("place", ["_on_request", "_on_response"])
def test_a_fault_of_ours_ends_its_connection_and_no_other(world, place, monkeypatch, caplog):
    other = world.connect_client(warm=4)
    client = world.clients[0]
    before = len(world.log)
    if place == "_on_response":
        send_request(world, client)
        for worker in world.fleet.workers:
            monkeypatch.setattr(world.dataplane.pools.of(worker), "response_template", None)
        world.answer(WHOLE)
    else:
        monkeypatch.setattr(world.dataplane.pools, "known", None)
        world.ask(client, chat_request())
    monkeypatch.undo()
    world.turn()
    assert (client.end, other.end, world.dataplane.loop.failures) == ("closed", "open", 1)
    assert [each["outcome"] for each in world.log[before:]] == ["cut_by_proxy"]
    assert (world.dataplane.in_flight, [each.in_flight for each in world.fleet.workers]) == (
        0,
        [0, 0],
    )
    exchange_once(world, other)
    assert world.log[-1]["status"] == 200
    assert caplog.records[0].levelno == logging.ERROR


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("speaks", [False, True])
def test_a_kept_connection_that_has_died_is_dialled_anew_once(
    listeners, monkeypatch, at_once, speaks
):
    """Its end comes with the same events as the request, behind it."""
    monkeypatch.setattr(event_loop, "MAX_PENDING_WRITERS", 1 if at_once else 32)

    def script(world, client):
        client.sock.sendall(chat_request())
        for end in world.idle_ends():
            end.plan = [b"HTTP/1.1 408 Bored\r\ncontent-length: 0\r\n\r\n"] if speaks else []
            end.plan += [CLOSES]
            while end.plan:
                end.say()
        world.turn()
        world.answer(WHOLE)
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=0, handed_over=2)
    assert world.log[-1]["status"] == 200
    if not speaks:
        assert [each["status"] for each in world.log] == [200] * 8
        assert not any(worker.health.failed_requests for worker in world.fleet.workers)


def test_a_way_that_was_given_up_reads_no_more_of_its_client(listeners, monkeypatch):
    """What was to be sent at once could not be, and the next request has come before the turn's
    end."""
    monkeypatch.setattr(event_loop, "MAX_PENDING_WRITERS", 1)

    def script(world, client):
        loop = world.dataplane.loop
        client.sock.sendall(chat_request())
        for end in world.idle_ends():
            end.close()
        for fd, mask in loop._epoll.poll(0):
            if loop._handlers[fd] is not None:
                loop._handlers[fd].on_event(mask)
        client.sock.sendall(chat_request())
        world.turn()
        world.answer(WHOLE)
        world.answer(WHOLE)
        world.more()

    assert [
        each["status"] for each in run_fast_and_slow(listeners, script, began=0, handed_over=1).log
    ] == [200] * 8


def test_a_drain_while_it_waits_closes_behind_the_answer(listeners):
    def script(world, client):
        send_request(world, client)
        world.dataplane.begin_drain()
        world.answer(WHOLE)

    world = run_fast_and_slow(listeners, script, began=1, handed_over=1)
    assert world.clients[0].came.count(b"connection: close\r\n") == 1
    assert world.clients[0].end == "closed"


def reads_late(world, client):
    """It has answers that it has not read."""
    client.connection.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    client.slow = True
    long = WHOLE.replace(b": 2", b": 4000").removesuffix(b"{}") + bytes(4000)
    while not client.connection.client.pending:
        world.ask(client, chat_request())
        world.answer(long)
    return long


def test_a_client_that_does_not_read_keeps_its_exchange(listeners):
    def script(world, client):
        long = reads_late(world, client)
        before = len(world.log)
        world.ask(client, chat_request())
        world.answer(long)
        assert (world.phases, len(world.log)) == (["client"], before)
        client.slow = False
        for _ in range(5):
            world.turn()
        assert (world.phases, len(world.log)) == (["idle"], before + 1)

    run_fast_and_slow(listeners, script, began=3, handed_over=1)


def test_a_drain_closes_behind_an_answer_that_was_read_late(listeners):
    def script(world, client):
        reads_late(world, client)
        world.dataplane.begin_drain()
        client.slow = False
        for _ in range(5):
            world.turn()
        assert client.end == "closed"

    run_fast_and_slow(listeners, script, began=2, handed_over=0)


def test_a_removed_workers_connections_close_behind_their_answer(listeners):
    def script(world, client):
        other = world.connect_client()
        send_request(world, client)
        world.ask(other, chat_request())
        world.remove(0)
        for _ in range(2):
            world.answer(WHOLE.replace(b"\r\n\r\n", b"\r\ndate: now\r\n\r\n"))
        assert [end.end for end in world.lines] == ["closed", "open"]

    run_fast_and_slow(listeners, script, began=1, handed_over=1)
