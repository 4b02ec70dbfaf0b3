"""Exchanges on the fast path that end early or fail: all their resources are released."""

import contextlib
import logging
import socket

import pytest

from tests.dataplane.both_drivers import (
    OK_RESPONSE,
    World,
    chat_request,
    exchange_once,
    flush_after_each_event,
    run_fast_and_slow,
    send_request,
    worker_sockets,
)

CLOSES = None


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(sock) for name, sock in worker_sockets(tmp_path).items()}


@pytest.fixture
def world(listeners):
    """A world with one client on the fast path."""
    with World(listeners).patched() as patched:
        patched.dataplane.settings.access_log_is_json = True
        patched.connect_client(warm=6)
        patched.began = patched.handed_over = 0
        yield patched


@pytest.mark.parametrize("half_close", ["abort", "answer"])
@pytest.mark.parametrize("half", [False, True])
def test_a_client_that_disconnects_while_it_waits(listeners, half_close, half):
    def script(world, client):
        send_request(world, client)
        client.disconnect(half=half)
        world.run_until_idle()
        world.worker_responds(OK_RESPONSE)

    world = run_fast_and_slow(
        listeners, script, f"half_close = '{half_close}'\n", began=1, handed_over=0
    )
    served = half and half_close == "answer"
    assert world.log[-1]["outcome"] == ("completed" if served else "client_disconnected")
    assert len(world.log) == 7


@pytest.mark.parametrize("half_close", ["abort", "answer"])
def test_a_client_that_half_closes_right_after_its_request(listeners, half_close):
    def script(world, client):
        client.sock.sendall(chat_request())
        client.disconnect(half=True)
        world.run_until_idle()
        world.worker_responds(OK_RESPONSE)

    world = run_fast_and_slow(
        listeners, script, f"half_close = '{half_close}'\n", began=0, handed_over=0
    )
    served = half_close == "answer"
    assert world.log[-1]["outcome"] == ("completed" if served else "client_disconnected")


@pytest.mark.parametrize("total", [0, 5])
def test_an_expired_timeout_is_a_504_and_counts_against_the_worker(listeners, total):
    def script(world, client):
        send_request(world, client)
        timeouts = world.dataplane.settings.timeouts
        world.wait(timeouts.total + 1 if total else timeouts.response_head + 1)

    world = run_fast_and_slow(
        listeners, script, f"request_timeout_secs = {total}\n", began=1, handed_over=1
    )
    assert (world.log[-1]["status"], world.log[-1]["error"]) == (504, "response_timeout")
    assert sum(worker.health.failed_requests for worker in world.fleet.workers) == 1


def test_the_end_of_the_event_loop_finalizes_each_exchange_once(listeners):
    def script(world, client):
        send_request(world, client)
        for task in list(world.dataplane.loop.tasks):
            task.close_coroutine()
        world.run_until_idle()

    world = run_fast_and_slow(listeners, script, began=1, handed_over=0)
    assert (world.log[-1]["outcome"], len(world.log)) == ("cut_by_proxy", 7)


@pytest.mark.parametrize("place", ["_on_request", "_on_response"])
def test_an_internal_error_ends_only_its_own_connection(world, place, monkeypatch, caplog):
    other = world.connect_client(warm=4)
    client = world.clients[0]
    before = len(world.log)
    if place == "_on_response":
        send_request(world, client)
        for worker in world.fleet.workers:
            monkeypatch.setattr(
                world.dataplane.upstream_pools.of(worker), "response_template", None
            )
        world.worker_responds(OK_RESPONSE)
    else:
        monkeypatch.setattr(world.dataplane.upstream_pools, "known", None)
        world.client_sends(client, chat_request())
    monkeypatch.undo()
    world.run_until_idle()
    assert (client.state, other.state, world.dataplane.loop.failures) == ("closed", "open", 1)
    assert [line["outcome"] for line in world.log[before:]] == ["cut_by_proxy"]
    assert (world.dataplane.in_flight, [worker.in_flight for worker in world.fleet.workers]) == (
        0,
        [0, 0],
    )
    exchange_once(world, other)
    assert world.log[-1]["status"] == 200
    assert caplog.records[0].levelno == logging.ERROR


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("responds", [False, True])
def test_a_dead_idle_connection_is_replaced_once(listeners, monkeypatch, at_once, responds):
    """The event of the close is in the same batch as the request, after it."""
    if at_once:
        flush_after_each_event(monkeypatch)

    def script(world, client):
        client.sock.sendall(chat_request())
        for connection in world.idle_connections():
            connection.to_send = (
                [b"HTTP/1.1 408 Bored\r\ncontent-length: 0\r\n\r\n"] if responds else []
            )
            connection.to_send += [CLOSES]
            while connection.to_send:
                connection.send_next()
        world.run_until_idle()
        world.worker_responds(OK_RESPONSE)
        exchange_once(world, client)

    world = run_fast_and_slow(listeners, script, began=0, handed_over=2)
    assert world.log[-1]["status"] == 200
    if not responds:
        assert [line["status"] for line in world.log] == [200] * 8
        assert not any(worker.health.failed_requests for worker in world.fleet.workers)


def test_an_abandoned_fast_path_does_not_read_the_next_request(listeners):
    """Sending failed, and the next request arrived before the iteration ended."""

    def script(world, client):
        loop = world.dataplane.loop
        client.sock.sendall(chat_request())
        for connection in world.idle_connections():
            connection.close()
        for fd, mask in loop._epoll.poll(0):
            if loop._handlers[fd] is not None:
                loop._handlers[fd].on_event(mask)
                loop.flush_writes()
        client.sock.sendall(chat_request())
        world.run_until_idle()
        world.worker_responds(OK_RESPONSE)
        world.worker_responds(OK_RESPONSE)
        world.worker_continues()

    world = run_fast_and_slow(listeners, script, began=0, handed_over=1)
    assert [line["status"] for line in world.log] == [200] * 8


def test_a_drain_closes_the_connection_after_the_response(listeners):
    def script(world, client):
        send_request(world, client)
        world.dataplane.begin_drain()
        world.worker_responds(OK_RESPONSE)

    world = run_fast_and_slow(listeners, script, began=1, handed_over=1)
    assert world.clients[0].received.count(b"connection: close\r\n") == 1
    assert world.clients[0].state == "closed"


def stop_reading(world, client):
    """Fill the buffers of the client's connection with responses that it does not read."""
    client.connection.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    client.slow = True
    long_response = OK_RESPONSE.replace(b": 2", b": 4000").removesuffix(b"{}") + bytes(4000)
    while not client.connection.client.pending:
        world.client_sends(client, chat_request())
        world.worker_responds(long_response)
    return long_response


def test_the_exchange_of_a_client_that_does_not_read_stays_open(listeners):
    def script(world, client):
        long_response = stop_reading(world, client)
        before = len(world.log)
        world.client_sends(client, chat_request())
        world.worker_responds(long_response)
        assert (world.phases, len(world.log)) == (["client"], before)
        client.slow = False
        for _ in range(5):
            world.run_until_idle()
        assert (world.phases, len(world.log)) == (["idle"], before + 1)

    run_fast_and_slow(listeners, script, began=3, handed_over=1)


def test_a_drain_closes_after_a_response_that_is_read_late(listeners):
    def script(world, client):
        stop_reading(world, client)
        world.dataplane.begin_drain()
        client.slow = False
        for _ in range(5):
            world.run_until_idle()
        assert client.state == "closed"

    run_fast_and_slow(listeners, script, began=2, handed_over=0)


def test_a_removed_workers_connections_close_after_their_response(listeners):
    def script(world, client):
        other = world.connect_client()
        send_request(world, client)
        world.client_sends(other, chat_request())
        world.remove_worker(0)
        for _ in range(2):
            world.worker_responds(OK_RESPONSE.replace(b"\r\n\r\n", b"\r\ndate: now\r\n\r\n"))
        assert [connection.state for connection in world.worker_connections] == ["closed", "open"]

    run_fast_and_slow(listeners, script, began=1, handed_over=1)
