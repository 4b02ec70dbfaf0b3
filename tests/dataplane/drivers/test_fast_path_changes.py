"""Changes of settings, the fleet and sockets while clients are on the fast path."""

import contextlib
import socket

import pytest

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.upstream.pool import UpstreamPool
from omni_proxy.fleet.worker import Worker
from tests.dataplane.both_drivers import (
    OK_RESPONSE,
    World,
    chat_request,
    exchange_once,
    run_fast_and_slow,
    send_request,
    worker_sockets,
)


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(sock) for name, sock in worker_sockets(tmp_path).items()}


CLAIMS = (b"x-mine: m1", b"x-forwarded-for: 1.2.3.4")


@pytest.mark.parametrize("before", ["append", "replace", "off"])
@pytest.mark.parametrize("after", ["append", "replace", "off"])
@pytest.mark.parametrize("name", ["", "x-mine"])
def test_a_reload_of_forwarded_headers_applies_to_open_connections(listeners, before, after, name):
    def script(world, client):
        for config in (f"forwarded = '{after}'\nrequest_id_header = '{name}'\n", initial):
            world.reload(config)
            for _ in range(3):
                world.client_sends(client, chat_request(fields=CLAIMS))
                world.worker_responds(OK_RESPONSE)

    initial = f"forwarded = '{before}'\nrequest_id_header = 'x-mine'\n"
    run_fast_and_slow(listeners, script, initial, began={0, 1}, handed_over={0, 1})


@pytest.mark.parametrize(
    "config",
    [
        "sse_keepalive_secs = 0.5\n",
        "max_payload_size = 10\n",
        "usage_metrics = true\n",
        "max_inflight = 1\n",
        "half_close = 'answer'\n",
        "[routing]\npolicy = 'cache_aware'\n",
        "[routing]\nsticky_sessions = true\n",
    ],
)
def test_a_reload_applies_to_the_next_request_of_an_open_connection(listeners, config):
    def script(world, client):
        for new_config in (config, ""):
            world.reload(new_config)
            for body in (b'{"messages": []}', b'{"messages": [], "stream": true}'):
                world.client_sends(client, chat_request(body=body))
                world.wait(1)
                world.worker_responds(OK_RESPONSE)

    run_fast_and_slow(listeners, script, began={0, 2}, handed_over=0)


ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "target" }]
"""


def test_a_waiting_request_keeps_an_alias_that_a_reload_removes(listeners):
    queue = "queue_size = 2\nqueue_timeout_secs = 5\n"

    def script(world, client):
        world.change_worker(0, disabled=True)
        world.change_worker(1, disabled=True)
        world.client_sends(client, chat_request(body=b'{"model": "alias", "messages": []}'))
        world.reload(queue)
        world.change_worker(0, disabled=False)
        world.worker_responds(OK_RESPONSE)

    world = run_fast_and_slow(listeners, script, queue + ALIAS, began={0, 1}, handed_over={0, 1})
    assert world.log[-1]["target_model"] == "target"
    assert any(
        b'"model": "target"' in connection.received for connection in world.worker_connections
    )


def test_the_log_has_no_rank_for_a_worker_without_ranks(listeners):
    def script(world, client):
        for ranks in (2, 0, 2):
            world.change_worker(0, ranks=ranks)
            for _ in range(3):
                world.client_sends(client, chat_request())
                world.worker_responds(OK_RESPONSE)

    def new_world(listeners, config, *, use_fast_path):
        ranks = {"a": {"ranks": 2}, "b": {"ranks": 2, "disabled": True}}
        return World(listeners, config, use_fast_path=use_fast_path, fields=ranks)

    world = run_fast_and_slow(
        listeners, script, began=9, handed_over={2, 3, 4}, new_world=new_world
    )
    assert [line["rank"] is None for line in world.log[-9::3]] == [False, True, False]


def test_a_response_of_a_worker_that_stopped_reading_is_relayed(listeners):
    def script(world, client):
        for connection in world.idle_connections():
            connection.sock.shutdown(socket.SHUT_RD)
        world.run_until_idle()
        world.client_sends(client, chat_request())
        for connection in world.worker_connections:
            with contextlib.suppress(OSError):
                connection.sock.sendall(OK_RESPONSE)
        world.run_until_idle()

    world = run_fast_and_slow(listeners, script, began=1, handed_over=1)
    assert world.log[-1]["status"] == 200


@pytest.mark.parametrize("config", ["half_close = 'abort'\n", "half_close = 'answer'\n"])
def test_a_pipelined_request_begins_before_the_disconnect_is_noticed(listeners, config):
    def script(world, client):
        world.client_sends(client, chat_request())
        world.client_sends(client, chat_request())
        for connection in world.worker_connections:
            if connection.unanswered:
                connection.unanswered -= 1
                connection.to_send = [OK_RESPONSE]
                connection.send_next()
        client.disconnect(half=True)
        world.run_until_idle()
        world.worker_responds(OK_RESPONSE)

    run_fast_and_slow(listeners, script, config, began=1, handed_over=0)


def test_an_idle_client_keeps_no_reference_to_a_removed_worker(listeners):
    def script(world, client):
        others = [world.connect_client(warm=3) for _ in range(3)]
        send_request(world, client)
        world.worker_responds(OK_RESPONSE)
        streams = [
            stream for pool in world.dataplane.upstream_pools.known.values() for stream in pool.idle
        ]
        world.remove_worker(0)
        world.remove_worker(0)
        world.run_until_idle()
        assert all(stream.closed for stream in streams)
        for idle_client in (client, *others):
            connection = idle_client.connection
            fast_path = connection.fast_path
            assert (connection.exchange, connection.upstream) == (None, None)
            if fast_path is not None:
                referenced = [getattr(fast_path, name) for name in type(fast_path).__slots__]
                referenced += [
                    getattr(kept, name)
                    for kept in referenced
                    if isinstance(kept, Exchange)  # it is recycled for the next request
                    for name in Exchange.__slots__
                ]
                assert not any(isinstance(kept, Worker | UpstreamPool) for kept in referenced)
                assert not any(isinstance(kept, Stream) and kept.closed for kept in referenced)

    run_fast_and_slow(listeners, script, began=7, handed_over=0)


def test_counts_are_correct_when_releasing_a_connection_fails(listeners, monkeypatch):
    with World(listeners, "[server]\nlog_format = 'json'\n").patched() as world:
        client = world.connect_client(warm=6)
        send_request(world, client)
        (busy_pool,) = [
            pool for pool in world.dataplane.upstream_pools.known.values() if not pool.idle
        ]
        with monkeypatch.context() as patch:
            patch.setattr(busy_pool, "idle", None)
            world.worker_responds(OK_RESPONSE)
        assert (world.dataplane.in_flight, world.dataplane.loop.failures) == (0, 1)
        assert not any(worker.in_flight for worker in world.fleet.workers)
        assert len(world.log) == 7
        exchange_once(world, world.connect_client())
