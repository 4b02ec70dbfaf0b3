"""The request of each leg of a pair, with and without the fast path: bodies, header fields, ids,
keys of workers, models of aliases, ranks."""

import pytest

from tests.dataplane.both_drivers import chat_request
from tests.dataplane.disaggregation.pair_world import (
    CONNECTORS,
    NAMES,
    PARAMS,
    bodies,
    finish,
    response_with,
    run_pairs,
)

GZIP = (b"accept-encoding: gzip",)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions", b"/generate"])
def test_each_leg_names_its_rank(listeners, connector, path):
    def request(body):
        return chat_request(body=body).replace(b"/v1/chat/completions", path)

    def script(world, client):
        for number in range(6):
            extra_fields = (
                b"",
                b', "n": 2',
                b', "disagg_prefill_dp_rank": 7',
                b', "max_tokens": 9',
            )
            world.client_sends(
                client,
                request(b'{"messages": [], "user": "%d"%b}' % (number, extra_fields[number % 4])),
            )
            if connector == "sglang" or path != b"/generate":
                world.prefill_responds()
            world.decode_responds()
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
    sent = b"".join(connection.received for connection in world.worker_connections)
    assert sent.lower().count(b"x-data-parallel-rank: ") == sent.count(b"POST ")


def test_both_legs_of_sglang_have_the_same_room_and_id(listeners):
    def script(world, client):
        world.serve(client)

    world = run_pairs(listeners, script, began=1, handed_over=0)
    (prefill,) = (
        bodies(connection)[-1] for connection in world.worker_connections if connection.name == "p"
    )
    (decode,) = (
        bodies(connection)[-1] for connection in world.worker_connections if connection.name == "d"
    )
    assert prefill == decode
    assert prefill["bootstrap_port"] == 9
    assert prefill["bootstrap_room"] == 0


def test_with_nixl_decode_gets_the_parameters_of_the_prefill_response(listeners):
    def script(world, client):
        world.serve(client)

    world = run_pairs(listeners, script, "nixl", began=1, handed_over=0)
    (decode,) = (connection for connection in world.worker_connections if connection.name == "d")
    assert b'"kv_transfer_params":' + PARAMS in decode.received


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
def test_both_paths_change_bodies_by_the_same_rules(listeners, connector, body):
    def script(world, client):
        for _ in range(2):
            world.client_sends(client, chat_request(body=body))
            if client.connection.exchange is not None:
                world.prefill_responds()
                world.decode_responds()

    world = run_pairs(listeners, script, connector, began={0, 2}, handed_over={0, 2})
    assert len(world.log) == 8


def test_a_retry_has_the_body_of_its_own_request(listeners):
    """Also if the body of the previous request was parsed completely."""

    def script(world, client):
        world.serve(client, chat_request(body=b'{"messages": [], "user": "0", "n": 2}'))
        world.client_sends(client, chat_request(body=b'{"messages": [], "user": "1"}'))
        world.decode_responds(None)  # it closes the connection
        finish(world)

    world = run_pairs(listeners, script, began=2, handed_over=1)
    sent = [
        body.get("user") for connection in world.worker_connections for body in bodies(connection)
    ]
    assert [sent.count(user) for user in "01"] == [2, 4]


ENCODED = [
    (),
    (b"accept-encoding: gzip",),
    (b"x-request-id: mine", b"accept-encoding: gzip"),
    (b"authorization: Bearer x",),
]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("fields", ENCODED, ids=str)
def test_both_paths_change_header_fields_by_the_same_rules(listeners, connector, fields):
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
def test_both_paths_change_varying_header_fields_by_the_same_rules(listeners, connector, fields):
    def script(world, client):
        for number in range(6):
            filled = tuple(field.replace(b"%d", b"%d" % number) for field in fields)
            world.serve(client, chat_request(fields=filled))

    run_pairs(listeners, script, connector, began={0, 1, 2, 3, 4, 5, 6}, handed_over=0)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_workers_own_key_is_sent(listeners, monkeypatch, connector):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def script(world, client):
        for at in range(4):
            world.change_worker(at, api_key_env="KEY_OF_A_WORKER")
        for field in (b"x-api-key: client", b"authorization: Bearer client"):
            for number in range(6):
                world.serve(client, chat_request(fields=(b"%b-%d" % (field, number),)))

    world = run_pairs(listeners, script, connector, began=6, handed_over=0)
    sent = b"".join(connection.received for connection in world.worker_connections)
    assert sent.count(b"authorization: Bearer secret\r\n") == 24
    assert b"client" not in sent


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_retried_leg_has_its_workers_own_key(listeners, monkeypatch, connector, role):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def script(world, client):
        for at in range(4):
            world.change_worker(at, api_key_env="KEY_OF_A_WORKER")
        world.client_sends(client, chat_request())
        if role == "decode" and connector == "nixl":
            world.prefill_responds()
        (world.prefill_responds if role == "prefill" else world.decode_responds)(None)
        finish(world)

    world = run_pairs(listeners, script, connector, began=1, handed_over={0, 1})
    sent = b"".join(connection.received for connection in world.worker_connections)
    assert sent.count(b"authorization: Bearer secret\r\n") == sent.count(b"POST ") - 12


ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "one", weight = 1 }, { model = "another-one", weight = 1 }]
"""
CHAT = b'{"messages": [], "model" : "alias", "max_tokens": 9, "n%b": 1, "x": 1.50}'


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("rewrite", [True, False])
# A body that is parsed for sglang, and one that is not.
@pytest.mark.parametrize("suffix", [b"", b"_"])
def test_both_legs_name_the_target_model_of_an_alias(listeners, connector, rewrite, suffix):
    def script(world, client):
        for _ in range(4):
            world.serve(client, chat_request(body=CHAT % suffix))

    config = f"{ALIAS}rewrite = {str(rewrite).lower()}\n"
    world = run_pairs(listeners, script, connector, config, began=4, handed_over=0)
    sent = [
        body
        for connection in world.worker_connections
        for body in bodies(connection)
        if body.get("x") == 1.5
    ]
    models = ["one", "another-one"] if rewrite else ["alias"]
    assert sorted(body["model"] for body in sent) == sorted(models * (8 // len(models)))
    assert {row["target_model"] for row in world.log[-4:]} == {"one", "another-one"}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_broken_leg_of_an_alias_is_retried(listeners, connector, role):
    def script(world, client):
        for _ in range(2):
            world.client_sends(client, chat_request(body=CHAT % b""))
            if role == "decode" and connector == "nixl":
                world.prefill_responds()
            (world.prefill_responds if role == "prefill" else world.decode_responds)(None)
            finish(world)

    world = run_pairs(listeners, script, connector, ALIAS, began={1, 2}, handed_over={0, 1, 2})
    sent = [
        body
        for connection in world.worker_connections
        for body in bodies(connection)
        if body.get("x") == 1.5
    ]
    assert len(sent) > 4
    assert {body["model"] for body in sent} == {"one", "another-one"}


IDS = [b'"mine"', b'""', b"null", b"7", b'["a", "b"]', b'"\\u00e4\\"x"', b'"a", "rid": "b"']
OWN_ID = b"0" * 32  # the proxy's id if the random numbers are 0


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/generate"])
@pytest.mark.parametrize("client_id", IDS, ids=bytes.decode)
def test_the_response_has_the_clients_own_id(listeners, path, client_id):
    request = chat_request(body=b'{"text": "x", "rid": %b}' % client_id, fields=GZIP)
    request = request.replace(b"/v1/chat/completions", path)

    def script(world, client):
        for _ in range(3):
            world.client_sends(client, request)
            if client.connection.exchange is not None:
                world.prefill_responds()
                world.decode_responds(response_with(b'{"meta_info": {"id": "%b"}}' % OWN_ID))

    world = run_pairs(listeners, script, began={0, 1, 2}, handed_over={0, 1, 2})
    sent = [
        body
        for connection in world.worker_connections
        for body in bodies(connection)
        if "text" in body
    ]
    assert {body["rid"] for body in sent} <= {OWN_ID.decode()}
    if client_id == b'"mine"':
        assert world.clients[0].received.count(b'{"id": "mine"}') == 3
        assert world.began > world.handed_over
        decodes = [
            connection
            for connection in world.worker_connections
            if NAMES[connection.name] == "decode"
        ]
        # The response must not be encoded, so that the proxy can read it.
        assert not any(b"accept-encoding" in connection.received for connection in decodes)


RESPONSE = response_with(b'{"id": "%b"}' % OWN_ID)
PLANS = {
    "whole": (RESPONSE,),
    "in parts": (RESPONSE[:-5], RESPONSE[-5:]),
    "cut": (RESPONSE[:-5], None),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_response_in_pieces_has_the_clients_own_id_too(listeners, plan):
    def script(world, client):
        for _ in range(3):
            world.client_sends(client, chat_request(body=b'{"messages": [], "rid": "mine"}'))
            world.prefill_responds()
            world.decode_responds(*plan)
            finish(world)

    run_pairs(listeners, script, began={1, 2, 3}, handed_over={0, 1, 2, 3})
