"""Each exit of the fast path of pairs, by name: the results are those of the driver alone."""

import pytest

from tests.dataplane.both_drivers import chat_request
from tests.dataplane.disaggregation.pair_world import (
    CONNECTORS,
    NAMES,
    PREFILL,
    answer,
    finish,
    run_pairs,
)

AT_ONCE = ["sglang", "mooncake"]
PARTS = answer()[:30], answer()[30:]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_ordinary_pairs_never_meet_the_driver(listeners, connector):
    def script(world, client):
        for number in range(4):
            world.serve(client, chat_request(body=b'{"messages": [], "user": "%d"}' % number))

    world = run_pairs(listeners, script, connector, began=4, handed_over=0)
    assert world.log[-1]["outcome"] == "completed"
    assert world.log[-1]["prefill"].startswith("unix:")
    assert [worker.in_flight for worker in world.fleet.workers] == [0] * 4
    assert sum(world.meters.legs["prefill"].counts) == 10


@pytest.mark.parametrize("connector", AT_ONCE)
def test_decode_may_answer_before_prefill(listeners, connector):
    def script(world, client):
        for _ in range(3):
            world.ask(client, chat_request())
            world.decode()
            assert client.came.count(b"HTTP/1.1 200") == len(world.log)
            world.prefill()

    run_pairs(listeners, script, connector, began=3, handed_over=0)


@pytest.mark.parametrize("connector", AT_ONCE)
def test_the_next_request_may_come_while_the_last_prefill_leg_still_runs(listeners, connector):
    def script(world, client):
        for _ in range(3):
            world.ask(client, chat_request())
            world.decode()
        assert world.dataplane.loop.side_tasks == 3
        for _ in range(3):
            world.prefill()

    run_pairs(listeners, script, connector, began={1, 2}, handed_over={1, 2})


@pytest.mark.parametrize("connector", CONNECTORS)
def test_ordinary_pairs_with_ranks_never_meet_the_driver(listeners, connector):
    def script(world, client):
        for number in range(4):
            world.serve(client, chat_request(body=b'{"messages": [], "user": "%d"}' % number))

    run_pairs(listeners, script, connector, ranks=2, began=4, handed_over=0)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_leg_at_a_rank_that_breaks_begins_anew(listeners, connector, role):
    def script(world, client):
        for _ in range(2):
            world.ask(client, chat_request())
            if role == "decode" and connector == "nixl":
                world.prefill()
            (world.prefill if role == "prefill" else world.decode)(None)
            finish(world)

    run_pairs(listeners, script, connector, ranks=2, began={1, 2}, handed_over={0, 1, 2})


def test_an_answer_of_prefill_without_parameters_is_no_error(listeners):
    def script(world, client):
        for _ in range(3):
            world.ask(client, chat_request())
            world.prefill(answer())
            world.decode()

    world = run_pairs(listeners, script, "nixl", began=3, handed_over=0)
    assert [line["fallback"] for line in world.log[-3:]] == ["no_params"] * 3


ANSWERS = {
    "parts": PARTS,
    "rest": (answer()[:-1], answer()[-1:]),
    "cut": (answer()[:-1], None),
    "closed": (None,),
    "more": (answer() + b"HTTP",),
    "400": (answer(status=b"400 No"),),
    "500": (answer(status=b"500 Oh"),),
    "503": (answer(status=b"503 Busy"),),
    "transfer": (answer(b'{"error": "KVTransferError"}', b"500 Oh"),),
    "empty": (answer(b""),),
    "other head": (answer(fields=b"date: now\r\n"),),
    "closes": (answer(fields=b"connection: close\r\n"), None),
    "garbage": (b"nonsense\r\n\r\n",),
    "chunked": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",),
    "events": (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        b"8\r\ndata: x\n\r\n",
        b"0\r\n\r\n",
    ),
}


@pytest.mark.parametrize("connector", ["sglang", "nixl"])
@pytest.mark.parametrize("plan", ANSWERS.values(), ids=ANSWERS)
def test_an_unusual_answer_of_decode(listeners, connector, plan):
    def script(world, client):
        for _ in range(2):
            if client.end == "open":
                world.ask(client, chat_request())
                world.prefill()
                world.decode(*plan)
                finish(world)

    run_pairs(listeners, script, connector, began={1, 2, 3}, handed_over={1, 2, 3})


@pytest.mark.parametrize("connector", ["sglang", "nixl"])
@pytest.mark.parametrize("plan", ANSWERS.values(), ids=ANSWERS)
def test_an_unusual_answer_of_prefill(listeners, connector, plan):
    def script(world, client):
        for _ in range(2):
            world.ask(client, chat_request())
            world.prefill(*plan)
            world.more()
            if connector != "nixl" and any(end.asked for end in world.lines if end.name in "de"):
                world.decode()
            finish(world)

    run_pairs(listeners, script, connector, began={1, 2, 3}, handed_over={0, 1, 2, 3})


@pytest.mark.parametrize("plan", ANSWERS.values(), ids=ANSWERS)
def test_an_unusual_answer_of_prefill_behind_the_response(listeners, plan):
    def script(world, client):
        for _ in range(2):
            world.ask(client, chat_request())
            world.decode()
            world.prefill(*plan)
            finish(world)

    run_pairs(listeners, script, began={1, 2}, handed_over={0, 1})


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("answered", ["nobody", "prefill"])
def test_a_client_that_leaves_ends_both_legs(listeners, connector, half, answered):
    def script(world, client):
        world.ask(client, chat_request())
        if answered == "prefill":
            world.prefill()
        client.leave(half=half)
        world.turn()
        assert [worker.in_flight for worker in world.fleet.workers] == [0] * 4
        finish(world)

    world = run_pairs(listeners, script, connector, began=1, handed_over=1)
    assert world.log[-1]["outcome"] == "client_disconnected"


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("answered", ["nobody", "prefill", "decode"])
@pytest.mark.parametrize("secs", [3, 40, 700])
def test_time_outs(listeners, connector, answered, secs):
    def script(world, client):
        world.ask(client, chat_request())
        if answered == "prefill":
            world.prefill()
        if answered == "decode" and connector != "nixl":
            world.decode()
        world.wait(secs)
        finish(world)

    run_pairs(listeners, script, connector, began=1, handed_over={0, 1})


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_idle_connections_that_broke_are_replaced(listeners, connector, role):
    def script(world, client):
        for end in world.lines:
            if NAMES[end.name] == role:
                end.plan = [None]  # it closes in the moment that the request comes
        client.sock.sendall(chat_request())
        for end in world.lines:
            if end.plan:
                end.say()
        world.turn()
        finish(world)

    run_pairs(listeners, script, connector, began={0, 1}, handed_over={0, 1, 2})


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_an_idle_connection_the_driver_dials(listeners, connector, role):
    def script(world, client):
        for end in world.idle_ends():
            if NAMES[end.name] == role:
                end.close()
        world.turn()
        world.serve(client)

    begun = 1 if (connector, role) == ("nixl", "decode") else 0
    run_pairs(listeners, script, connector, began=begun, handed_over=1)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("at", [0, 2], ids=["prefill", "decode"])
def test_new_weights_during_the_wait_begin_it_anew(listeners, connector, at):
    def script(world, client):
        world.ask(client, chat_request())
        if connector == "nixl" and at == 2:
            world.prefill()
        world.fleet.set_version(world.fleet.workers[at], "new", 2)
        world.prefill() if connector != "nixl" or at == 0 else None
        if connector != "nixl":
            world.decode()
        finish(world)

    run_pairs(listeners, script, connector, began=1, handed_over=1)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_good_answers_make_good_for_failed_ones(listeners, connector):
    def script(world, client):
        for worker in world.fleet.workers:
            world.blame(worker)
        world.serve(client)
        world.serve(client)

    world = run_pairs(listeners, script, connector, began=2, handed_over=2)
    assert [worker.health.failed_requests for worker in world.fleet.workers] == [0] * 4


@pytest.mark.parametrize("connector", CONNECTORS)
def test_bodies_of_both_legs_count_as_held(listeners, connector):
    body = b'{"messages": "%b"}' % (b"x" * 400)

    def script(world, client):
        world.ask(client, chat_request(body=body))
        assert world.dataplane.inflight.held_bytes > 3 * len(body)
        world.prefill()
        world.decode()
        world.reload("max_held_bytes = 1100\n")
        for _ in range(3):
            world.ask(client, chat_request(body=body))

    world = run_pairs(listeners, script, connector, began=1, handed_over={0, 1, 2, 3})
    assert world.log[-1]["status"] == 503


@pytest.mark.parametrize("connector", CONNECTORS)
def test_another_fleet_takes_effect_at_once(listeners, connector):
    def script(world, client):
        world.serve(client)
        for at in (0, 1):
            world.change(at, disabled=True)
        for _ in range(2):
            world.ask(client, chat_request())
            world.answer()
        for at in range(4):
            world.change(at, role="regular", disabled=False)
        for _ in range(8):
            world.ask(client, chat_request())
            world.answer(answer())

    run_pairs(
        listeners, script, connector, began={2, 3, 4, 5, 6, 7, 8}, handed_over={0, 1, 2, 3, 4}
    )


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_proxy_that_drains_ends_the_pair_first(listeners, connector):
    def script(world, client):
        world.ask(client, chat_request())
        world.dataplane.begin_drain()
        world.prefill()
        world.decode()

    world = run_pairs(listeners, script, connector, began=1, handed_over=1)
    assert world.clients[0].end in ("closed", "left")
    assert PREFILL


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_loads_that_engines_report_are_taken_from_both_legs(listeners, connector):
    def fields(waiting):
        named = b'{"named_metrics": {"num_requests_waiting": %d.0}}' % waiting
        return b"endpoint-load-metrics: JSON %b\r\n" % named

    def script(world, client):
        for waiting in range(4):
            world.ask(client, chat_request())
            world.prefill(answer(PREFILL, fields=fields(waiting)))
            world.decode(answer(fields=fields(10 + waiting)))

    config = "[routing]\noverload_waiting = 100\n"
    world = run_pairs(listeners, script, connector, config, began=4, handed_over=0)
    waiting = [worker.engine_load.report.waiting for worker in world.fleet.workers]
    assert waiting == [2.0, 3.0, 12.0, 13.0]
    assert b"endpoint-load" not in world.clients[0].came
    asked = b"".join(end.came for end in world.lines)
    assert asked.count(b"endpoint-load-metrics-format: JSON\r\n") == asked.count(b"POST ")
