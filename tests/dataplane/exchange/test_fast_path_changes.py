"""Changes while clients are on the fast path: settings, the fleet, the sockets themselves."""

import contextlib
import socket

import pytest

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.upstream.pool import UpstreamPool
from omni_proxy.fleet.worker import Worker
from tests.dataplane.both_drivers import (
    WHOLE,
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
        yield {name: stack.enter_context(each) for name, each in worker_sockets(tmp_path).items()}


CLAIMS = (b"x-mine: m1", b"x-forwarded-for: 1.2.3.4")


@pytest.mark.parametrize("before", ["append", "replace", "off"])
@pytest.mark.parametrize("after", ["append", "replace", "off"])
@pytest.mark.parametrize("name", ["", "x-mine"])
def test_other_forwarded_headers_apply_to_open_connections(listeners, before, after, name):
    def script(world, client):
        for config in (f"forwarded = '{after}'\nrequest_id_header = '{name}'\n", f"{config_of}"):
            world.reload(config)
            for _ in range(3):
                world.ask(client, chat_request(fields=CLAIMS))
                world.answer(WHOLE)

    config_of = f"forwarded = '{before}'\nrequest_id_header = 'x-mine'\n"
    run_fast_and_slow(listeners, script, config_of, began={0, 1}, handed_over={0, 1})


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
def test_another_setting_holds_for_the_next_request_of_an_open_connection(listeners, config):
    def script(world, client):
        for each in (config, ""):
            world.reload(each)
            for body in (b'{"messages": []}', b'{"messages": [], "stream": true}'):
                world.ask(client, chat_request(body=body))
                world.wait(1)
                world.answer(WHOLE)

    run_fast_and_slow(listeners, script, began={0, 2}, handed_over=0)


ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "target" }]
"""


def test_a_request_that_waits_keeps_its_alias_when_the_configuration_loses_it(listeners):
    queue = "queue_size = 2\nqueue_timeout_secs = 5\n"

    def script(world, client):
        world.change(0, disabled=True)
        world.change(1, disabled=True)
        world.ask(client, chat_request(body=b'{"model": "alias", "messages": []}'))
        world.reload(queue)
        world.change(0, disabled=False)
        world.answer(WHOLE)

    world = run_fast_and_slow(listeners, script, queue + ALIAS, began={0, 1}, handed_over={0, 1})
    assert world.log[-1]["target_model"] == "target"
    assert any(b'"model": "target"' in end.came for end in world.lines)


def test_a_worker_that_lost_its_ranks_is_logged_without_one(listeners):
    def script(world, client):
        for ranks in (2, 0, 2):
            world.change(0, ranks=ranks)
            for _ in range(3):
                world.ask(client, chat_request())
                world.answer(WHOLE)

    def new_world(*given, short):
        ranks = {"a": {"ranks": 2}, "b": {"ranks": 2, "disabled": True}}
        return World(*given, short=short, fields=ranks)

    world = run_fast_and_slow(
        listeners, script, began=9, handed_over={2, 3, 4}, new_world=new_world
    )
    assert [line["rank"] is None for line in world.log[-9::3]] == [False, True, False]


def test_a_response_of_a_worker_that_stopped_reading_is_relayed(listeners):
    def script(world, client):
        for end in world.idle_ends():
            end.sock.shutdown(socket.SHUT_RD)
        world.turn()
        world.ask(client, chat_request())
        for end in world.lines:
            with contextlib.suppress(OSError):
                end.sock.sendall(WHOLE)
        world.turn()

    world = run_fast_and_slow(listeners, script, began=1, handed_over=1)
    assert world.log[-1]["status"] == 200


@pytest.mark.parametrize("config", ["half_close = 'abort'\n", "half_close = 'answer'\n"])
def test_a_pipelined_request_begins_before_the_disconnect_is_seen(listeners, config):
    def script(world, client):
        world.ask(client, chat_request())
        world.ask(client, chat_request())
        for end in world.lines:
            if end.asked:
                end.asked -= 1
                end.plan = [WHOLE]
                end.say()
        client.leave(half=True)
        world.turn()
        world.answer(WHOLE)

    run_fast_and_slow(listeners, script, config, began=1, handed_over=0)


def test_an_idle_client_keeps_nothing_of_a_worker_that_is_gone(listeners):
    def script(world, client):
        others = [world.connect_client(warm=3) for _ in range(3)]
        send_request(world, client)
        world.answer(WHOLE)
        streams = [each for pool in world.dataplane.pools.known.values() for each in pool.idle]
        world.remove(0)
        world.remove(0)
        world.turn()
        assert all(each.closed for each in streams)
        for each in (client, *others):
            fast_path, connection = each.connection.fast_path, each.connection
            assert (connection.exchange, connection.upstream) == (None, None)
            if fast_path is not None:
                refers = [getattr(fast_path, name) for name in type(fast_path).__slots__]
                refers += [
                    getattr(each, name)
                    for each in refers
                    if isinstance(each, Exchange)  # to be used again
                    for name in Exchange.__slots__
                ]
                assert not any(isinstance(each, Worker | UpstreamPool) for each in refers)
                assert not any(isinstance(each, Stream) and each.closed for each in refers)

    run_fast_and_slow(listeners, script, began=7, handed_over=0)


def test_a_connection_that_can_not_be_given_back_costs_no_count(listeners, monkeypatch):
    with World(listeners, "[server]\nlog_format = 'json'\n").at_work() as world:
        client = world.connect_client(warm=6)
        send_request(world, client)
        (pool,) = [each for each in world.dataplane.pools.known.values() if not each.idle]
        with monkeypatch.context() as patch:
            patch.setattr(pool, "idle", None)
            world.answer(WHOLE)
        assert (world.dataplane.in_flight, world.dataplane.loop.failures) == (0, 1)
        assert not any(worker.in_flight for worker in world.fleet.workers)
        assert len(world.log) == 7
        exchange_once(world, world.connect_client())
