"""Every case in which a pair leaves the fast path: the results are those of the slow path."""

import pytest

from tests.dataplane.both_drivers import chat_request
from tests.dataplane.disaggregation.pair_world import (
    CONNECTORS,
    NAMES,
    PREFILL,
    finish,
    response_with,
    run_pairs,
)

AT_ONCE = ["sglang", "mooncake"]
PARTS = response_with()[:30], response_with()[30:]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_ordinary_pairs_stay_on_the_fast_path(listeners, connector):
    def script(world, client):
        for number in range(4):
            world.serve(client, chat_request(body=b'{"messages": [], "user": "%d"}' % number))

    world = run_pairs(listeners, script, connector, began=4, handed_over=0)
    assert world.log[-1]["outcome"] == "completed"
    assert world.log[-1]["prefill"].startswith("unix:")
    assert [worker.in_flight for worker in world.fleet.workers] == [0] * 4
    assert sum(world.meters.legs["prefill"].counts) == 10


@pytest.mark.parametrize("connector", AT_ONCE)
def test_decode_may_respond_before_prefill(listeners, connector):
    def script(world, client):
        for _ in range(3):
            world.client_sends(client, chat_request())
            world.decode_responds()
            assert client.received.count(b"HTTP/1.1 200") == len(world.log)
            world.prefill_responds()

    run_pairs(listeners, script, connector, began=3, handed_over=0)


@pytest.mark.parametrize("connector", AT_ONCE)
def test_the_next_request_may_begin_while_the_last_prefill_leg_is_open(listeners, connector):
    def script(world, client):
        for _ in range(3):
            world.client_sends(client, chat_request())
            world.decode_responds()
        assert world.dataplane.loop.side_tasks == 3
        for _ in range(3):
            world.prefill_responds()

    run_pairs(listeners, script, connector, began={1, 2}, handed_over={1, 2})


@pytest.mark.parametrize("connector", CONNECTORS)
def test_ordinary_pairs_with_ranks_stay_on_the_fast_path(listeners, connector):
    def script(world, client):
        for number in range(4):
            world.serve(client, chat_request(body=b'{"messages": [], "user": "%d"}' % number))

    run_pairs(listeners, script, connector, ranks=2, began=4, handed_over=0)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_broken_leg_at_a_rank_is_retried(listeners, connector, role):
    def script(world, client):
        for _ in range(2):
            world.client_sends(client, chat_request())
            if role == "decode" and connector == "nixl":
                world.prefill_responds()
            (world.prefill_responds if role == "prefill" else world.decode_responds)(None)
            finish(world)

    run_pairs(listeners, script, connector, ranks=2, began={1, 2}, handed_over={0, 1, 2})


def test_a_prefill_response_without_transfer_parameters_is_no_error(listeners):
    def script(world, client):
        for _ in range(3):
            world.client_sends(client, chat_request())
            world.prefill_responds(response_with())
            world.decode_responds()

    world = run_pairs(listeners, script, "nixl", began=3, handed_over=0)
    assert [line["fallback"] for line in world.log[-3:]] == ["no_params"] * 3


RESPONSES = {
    "parts": PARTS,
    "rest": (response_with()[:-1], response_with()[-1:]),
    "cut": (response_with()[:-1], None),
    "closed": (None,),
    "more": (response_with() + b"HTTP",),
    "400": (response_with(status=b"400 No"),),
    "500": (response_with(status=b"500 Oh"),),
    "503": (response_with(status=b"503 Busy"),),
    "transfer": (response_with(b'{"error": "KVTransferError"}', b"500 Oh"),),
    "empty": (response_with(b""),),
    "other head": (response_with(fields=b"date: now\r\n"),),
    "closes": (response_with(fields=b"connection: close\r\n"), None),
    "garbage": (b"nonsense\r\n\r\n",),
    "chunked": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",),
    "events": (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        b"8\r\ndata: x\n\r\n",
        b"0\r\n\r\n",
    ),
}


@pytest.mark.parametrize("connector", ["sglang", "nixl"])
@pytest.mark.parametrize("plan", RESPONSES.values(), ids=RESPONSES)
def test_an_unusual_decode_response(listeners, connector, plan):
    def script(world, client):
        for _ in range(2):
            if client.state == "open":
                world.client_sends(client, chat_request())
                world.prefill_responds()
                world.decode_responds(*plan)
                finish(world)

    run_pairs(listeners, script, connector, began={1, 2, 3}, handed_over={1, 2, 3})


@pytest.mark.parametrize("connector", ["sglang", "nixl"])
@pytest.mark.parametrize("plan", RESPONSES.values(), ids=RESPONSES)
def test_an_unusual_prefill_response(listeners, connector, plan):
    def script(world, client):
        for _ in range(2):
            world.client_sends(client, chat_request())
            world.prefill_responds(*plan)
            world.worker_continues()
            if connector != "nixl" and any(
                connection.unanswered
                for connection in world.worker_connections
                if connection.name in "de"
            ):
                world.decode_responds()
            finish(world)

    run_pairs(listeners, script, connector, began={1, 2, 3}, handed_over={0, 1, 2, 3})


@pytest.mark.parametrize("plan", RESPONSES.values(), ids=RESPONSES)
def test_an_unusual_prefill_response_after_that_of_decode(listeners, plan):
    def script(world, client):
        for _ in range(2):
            world.client_sends(client, chat_request())
            world.decode_responds()
            world.prefill_responds(*plan)
            finish(world)

    run_pairs(listeners, script, began={1, 2}, handed_over={0, 1})


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("responded", ["none", "prefill"])
def test_a_client_that_leaves_ends_both_legs(listeners, connector, half, responded):
    def script(world, client):
        world.client_sends(client, chat_request())
        if responded == "prefill":
            world.prefill_responds()
        client.disconnect(half=half)
        world.run_until_idle()
        assert [worker.in_flight for worker in world.fleet.workers] == [0] * 4
        finish(world)

    world = run_pairs(listeners, script, connector, began=1, handed_over=1)
    assert world.log[-1]["outcome"] == "client_disconnected"


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("responded", ["none", "prefill", "decode"])
@pytest.mark.parametrize("secs", [3, 40, 700])
def test_timeouts_of_both_legs(listeners, connector, responded, secs):
    def script(world, client):
        world.client_sends(client, chat_request())
        if responded == "prefill":
            world.prefill_responds()
        if responded == "decode" and connector != "nixl":
            world.decode_responds()
        world.wait(secs)
        finish(world)

    run_pairs(listeners, script, connector, began=1, handed_over={0, 1})


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_idle_connections_that_broke_are_replaced(listeners, connector, role):
    def script(world, client):
        for connection in world.worker_connections:
            if NAMES[connection.name] == role:
                connection.to_send = [None]  # it closes at the moment the request is sent
        client.sock.sendall(chat_request())
        for connection in world.worker_connections:
            if connection.to_send:
                connection.send_next()
        world.run_until_idle()
        finish(world)

    run_pairs(listeners, script, connector, began={0, 1}, handed_over={0, 1, 2})


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_an_idle_connection_the_coroutine_connects(listeners, connector, role):
    def script(world, client):
        for connection in world.idle_connections():
            if NAMES[connection.name] == role:
                connection.close()
        world.run_until_idle()
        world.serve(client)

    began = 1 if (connector, role) == ("nixl", "decode") else 0
    run_pairs(listeners, script, connector, began=began, handed_over=1)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("at", [0, 2], ids=["prefill", "decode"])
def test_new_weights_while_a_pair_runs(listeners, connector, at):
    def script(world, client):
        world.client_sends(client, chat_request())
        if connector == "nixl" and at == 2:
            world.prefill_responds()
        world.fleet.set_version(world.fleet.workers[at], "new", 2)
        world.prefill_responds() if connector != "nixl" or at == 0 else None
        if connector != "nixl":
            world.decode_responds()
        finish(world)

    run_pairs(listeners, script, connector, began=1, handed_over=1)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_successful_responses_reset_the_failure_counts(listeners, connector):
    def script(world, client):
        for worker in world.fleet.workers:
            world.record_failure(worker)
        world.serve(client)
        world.serve(client)

    world = run_pairs(listeners, script, connector, began=2, handed_over=2)
    assert [worker.health.failed_requests for worker in world.fleet.workers] == [0] * 4


@pytest.mark.parametrize("connector", CONNECTORS)
def test_held_bytes_include_the_bodies_of_both_legs(listeners, connector):
    body = b'{"messages": "%b"}' % (b"x" * 400)

    def script(world, client):
        world.client_sends(client, chat_request(body=body))
        assert world.dataplane.inflight.held_bytes > 3 * len(body)
        world.prefill_responds()
        world.decode_responds()
        world.reload("max_held_bytes = 1100\n")
        for _ in range(3):
            world.client_sends(client, chat_request(body=body))

    world = run_pairs(listeners, script, connector, began=1, handed_over={0, 1, 2, 3})
    assert world.log[-1]["status"] == 503


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_change_of_the_fleet_takes_effect_at_once(listeners, connector):
    def script(world, client):
        world.serve(client)
        for at in (0, 1):
            world.change_worker(at, disabled=True)
        for _ in range(2):
            world.client_sends(client, chat_request())
            world.worker_responds()
        for at in range(4):
            world.change_worker(at, role="regular", disabled=False)
        for _ in range(8):
            world.client_sends(client, chat_request())
            world.worker_responds(response_with())

    run_pairs(
        listeners, script, connector, began={2, 3, 4, 5, 6, 7, 8}, handed_over={0, 1, 2, 3, 4}
    )


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_draining_proxy_completes_the_pair_first(listeners, connector):
    def script(world, client):
        world.client_sends(client, chat_request())
        world.dataplane.begin_drain()
        world.prefill_responds()
        world.decode_responds()

    world = run_pairs(listeners, script, connector, began=1, handed_over=1)
    assert world.clients[0].state in ("closed", "left")


@pytest.mark.parametrize("connector", CONNECTORS)
def test_load_reports_are_read_from_both_legs(listeners, connector):
    def fields(waiting):
        metrics = b'{"named_metrics": {"num_requests_waiting": %d.0}}' % waiting
        return b"endpoint-load-metrics: JSON %b\r\n" % metrics

    def script(world, client):
        for waiting in range(4):
            world.client_sends(client, chat_request())
            world.prefill_responds(response_with(PREFILL, fields=fields(waiting)))
            world.decode_responds(response_with(fields=fields(10 + waiting)))

    config = "[routing]\noverload_waiting = 100\n"
    world = run_pairs(listeners, script, connector, config, began=4, handed_over=0)
    waiting = [worker.engine_load.report.waiting for worker in world.fleet.workers]
    assert waiting == [2.0, 3.0, 12.0, 13.0]
    assert b"endpoint-load" not in world.clients[0].received
    requests = b"".join(connection.received for connection in world.worker_connections)
    assert requests.count(b"endpoint-load-metrics-format: JSON\r\n") == requests.count(b"POST ")
