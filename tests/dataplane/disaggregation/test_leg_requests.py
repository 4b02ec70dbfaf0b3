"""What each leg of a pair is sent, on the fast path as by the driver: bodies, head lines, ids, keys
of workers, models of aliases, ranks."""

import pytest

from tests.dataplane.both_drivers import chat_request
from tests.dataplane.disaggregation.pair_world import (
    CONNECTORS,
    NAMES,
    PARAMS,
    answer,
    bodies,
    finish,
    run_pairs,
)

GZIP = (b"accept-encoding: gzip",)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions", b"/generate"])
def test_each_leg_gets_its_rank(listeners, connector, path):
    def request(body):
        return chat_request(body=body).replace(b"/v1/chat/completions", path)

    def script(world, client):
        for number in range(6):
            more = (b"", b', "n": 2', b', "disagg_prefill_dp_rank": 7', b', "max_tokens": 9')
            world.ask(
                client, request(b'{"messages": [], "user": "%d"%b}' % (number, more[number % 4]))
            )
            if connector == "sglang" or path != b"/generate":
                world.prefill()
            world.decode()
        ranks = [rank for worker in world.fleet.workers for rank in worker.dp_ranks]
        assert [rank.in_flight for rank in ranks] == [0] * 8

    world = run_pairs(
        listeners,
        script,
        connector,
        ranks=2,
        began={0, 1, 2, 3, 4, 5, 6},
        handed_over={0, 1, 2, 3, 4, 5, 6},
    )
    came = b"".join(end.came for end in world.lines)
    assert came.lower().count(b"x-data-parallel-rank: ") == came.count(b"POST ")


def test_both_legs_of_sglang_get_one_room_and_id(listeners):
    def script(world, client):
        world.serve(client)

    world = run_pairs(listeners, script, began=1, handed_over=0)
    (prefill,) = (bodies(end)[-1] for end in world.lines if end.name == "p")
    (decode,) = (bodies(end)[-1] for end in world.lines if end.name == "d")
    assert prefill == decode
    assert prefill["bootstrap_port"] == 9
    assert prefill["bootstrap_room"] == 0


def test_decode_gets_what_prefill_answered_with_nixl(listeners):
    def script(world, client):
        world.serve(client)

    world = run_pairs(listeners, script, "nixl", began=1, handed_over=0)
    (decode,) = (end for end in world.lines if end.name == "d")
    assert b'"kv_transfer_params":' + PARAMS in decode.came


BODIES = [
    b'{"messages": [], "rid": "mine"}',
    b'{"messages": [], "n": 3}',
    b'{"messages": [], "max_tokens": 7, "max_completion_tokens": 8, "stream_options": {}}',
    b'{"messages": [], "stream": true}',
    b'{"messages": [], "rid": "a", "rid": "b", "max_tokens": 1, "max_tokens": 2}',
    b'{"messages": [], "kv_transfer_params": {"a": 1}}',
    b'{"messages": "%b"}' % (b"x" * 5000),
]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[16:40].decode())
def test_bodies_are_changed_by_the_same_rules(listeners, connector, body):
    def script(world, client):
        for _ in range(2):
            world.ask(client, chat_request(body=body))
            if client.connection.exchange is not None:
                world.prefill()
                world.decode()

    world = run_pairs(listeners, script, connector, began={0, 2}, handed_over={0, 2})
    assert len(world.log) == 8


def test_a_retry_has_the_body_of_its_own_request(listeners):
    """Also behind one that was read for more than its fields."""

    def script(world, client):
        world.serve(client, chat_request(body=b'{"messages": [], "user": "0", "n": 2}'))
        world.ask(client, chat_request(body=b'{"messages": [], "user": "1"}'))
        world.decode(None)  # it closes the connection
        finish(world)

    world = run_pairs(listeners, script, began=2, handed_over=1)
    sent = [body.get("user") for end in world.lines for body in bodies(end)]
    assert [sent.count(user) for user in "01"] == [2, 4]


ENCODED = [
    (),
    (b"accept-encoding: gzip",),
    (b"x-request-id: mine", b"accept-encoding: gzip"),
    (b"authorization: Bearer x",),
]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("fields", ENCODED, ids=str)
def test_head_lines_are_changed_by_the_same_rules(listeners, connector, fields):
    def script(world, client):
        for _ in range(5):
            world.serve(client, chat_request(fields=fields))

    run_pairs(listeners, script, connector, began={3, 5}, handed_over=0)


VARYING = [
    (b"accept-encoding: gzip;q=0.%d", b"x-a: %d"),
    (b"Accept-Encoding: gzip", b"x-a: %d", b"ACCEPT-ENCODING: br"),
    (b"x-a: %d", b"accept-encoding: gzip", b"X-Request-Id: mine-%d"),
    (b"x-request-id: mine", b"x-a: %d", b"x-accept-encoding: gzip"),
    (b"X-Correlation-Id: of-%d", b"x-accept-encoding: %d"),
    (b"x-request-id: ", b"x-a: %d"),
]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("fields", VARYING, ids=str)
def test_head_lines_whose_values_vary_are_changed_by_the_same_rules(listeners, connector, fields):
    def script(world, client):
        for number in range(6):
            filled = tuple(field.replace(b"%d", b"%d" % number) for field in fields)
            world.serve(client, chat_request(fields=filled))

    run_pairs(listeners, script, connector, began={0, 1, 2, 3, 4, 5, 6}, handed_over=0)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_key_of_a_workers_own_is_sent(listeners, monkeypatch, connector):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def script(world, client):
        for at in range(4):
            world.change(at, api_key_env="KEY_OF_A_WORKER")
        for field in (b"x-api-key: theirs", b"authorization: Bearer theirs"):
            for number in range(6):
                world.serve(client, chat_request(fields=(b"%b-%d" % (field, number),)))

    world = run_pairs(listeners, script, connector, began=6, handed_over=0)
    came = b"".join(end.came for end in world.lines)
    assert came.count(b"authorization: Bearer secret\r\n") == 24
    assert b"theirs" not in came


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_leg_is_sent_again_with_its_workers_own_key(listeners, monkeypatch, connector, role):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def script(world, client):
        for at in range(4):
            world.change(at, api_key_env="KEY_OF_A_WORKER")
        world.ask(client, chat_request())
        if role == "decode" and connector == "nixl":
            world.prefill()
        (world.prefill if role == "prefill" else world.decode)(None)
        finish(world)

    world = run_pairs(listeners, script, connector, began=1, handed_over={0, 1})
    came = b"".join(end.came for end in world.lines)
    assert came.count(b"authorization: Bearer secret\r\n") == came.count(b"POST ") - 12


ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "one", weight = 1 }, { model = "another-one", weight = 1 }]
"""
CHAT = b'{"messages": [], "model" : "alias", "max_tokens": 9, "n%b": 1, "x": 1.50}'


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("rewrite", [True, False])
@pytest.mark.parametrize(
    "more", [b"", b"_"]
)  # a body that is parsed for sglang, and one that is not
def test_both_legs_get_the_model_of_an_aliass_target(listeners, connector, rewrite, more):
    def script(world, client):
        for _ in range(4):
            world.serve(client, chat_request(body=CHAT % more))

    config = f"{ALIAS}rewrite = {str(rewrite).lower()}\n"
    world = run_pairs(listeners, script, connector, config, began=4, handed_over=0)
    sent = [body for end in world.lines for body in bodies(end) if body.get("x") == 1.5]
    models = ["one", "another-one"] if rewrite else ["alias"]
    assert sorted(body["model"] for body in sent) == sorted(models * (8 // len(models)))
    assert {row["target_model"] for row in world.log[-4:]} == {"one", "another-one"}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_leg_of_an_alias_that_breaks_begins_anew(listeners, connector, role):
    def script(world, client):
        for _ in range(2):
            world.ask(client, chat_request(body=CHAT % b""))
            if role == "decode" and connector == "nixl":
                world.prefill()
            (world.prefill if role == "prefill" else world.decode)(None)
            finish(world)

    world = run_pairs(listeners, script, connector, ALIAS, began={1, 2}, handed_over={0, 1, 2})
    sent = [body for end in world.lines for body in bodies(end) if body.get("x") == 1.5]
    assert len(sent) > 4
    assert {body["model"] for body in sent} == {"one", "another-one"}


IDS = [b'"mine"', b'""', b"null", b"7", b'["a", "b"]', b'"\\u00e4\\"x"', b'"a", "rid": "b"']
OURS = b"0" * 32  # of random numbers that are 0


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/generate"])
@pytest.mark.parametrize("given", IDS, ids=bytes.decode)
def test_the_answer_has_the_clients_own_id(listeners, path, given):
    request = chat_request(body=b'{"text": "x", "rid": %b}' % given, fields=GZIP)
    request = request.replace(b"/v1/chat/completions", path)

    def script(world, client):
        for _ in range(3):
            world.ask(client, request)
            if client.connection.exchange is not None:
                world.prefill()
                world.decode(answer(b'{"meta_info": {"id": "%b"}}' % OURS))

    world = run_pairs(listeners, script, began={0, 1, 2}, handed_over={0, 1, 2})
    sent = [body for end in world.lines for body in bodies(end) if "text" in body]
    assert {body["rid"] for body in sent} <= {OURS.decode()}
    if given == b'"mine"':
        assert world.clients[0].came.count(b'{"id": "mine"}') == 3
        assert world.began > world.handed_over
        decodes = [end for end in world.lines if NAMES[end.name] == "decode"]
        assert not any(b"accept-encoding" in end.came for end in decodes)  # it is read


WHOLE = answer(b'{"id": "%b"}' % OURS)
PLANS = {"whole": (WHOLE,), "in parts": (WHOLE[:-5], WHOLE[-5:]), "cut": (WHOLE[:-5], None)}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_answer_that_does_not_come_whole_gets_the_id_all_the_same(listeners, plan):
    def script(world, client):
        for _ in range(3):
            world.ask(client, chat_request(body=b'{"messages": [], "rid": "mine"}'))
            world.prefill()
            world.decode(*plan)
            finish(world)

    run_pairs(listeners, script, began={1, 2, 3}, handed_over={0, 1, 2, 3})
