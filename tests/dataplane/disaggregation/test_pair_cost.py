"""The bytecodes of a request in two legs compared with those of a plain one: they do not depend on
the machine's load. The goal of docs/performance.md, at most 2.2 times, is for CPU time."""

import pytest

from omni_proxy import native
from tests.dataplane.both_drivers import World, chat_request
from tests.dataplane.bytecodes import OK_RESPONSE, count_bytecodes, small_post
from tests.dataplane.disaggregation.pair_world import NAMES, PREFILL, response_with, world_of

pytestmark = pytest.mark.skipif(native.build() == "native", reason="compiled code has no bytecodes")
MOST = 2.15
MAX_WITH_ID = 2.8
CONNECTORS = ("sglang", "nixl", "mooncake")
ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "target" }]
"""


def serving_plain(request):
    def serve(world, client):
        world.client_sends(client, request)
        world.worker_responds(OK_RESPONSE)

    return serve


def serving_pair(request):
    def serve(world, client):
        world.client_sends(client, request)
        world.prefill_responds(response_with(PREFILL))
        world.decode_responds(OK_RESPONSE)

    return serve


def assert_bound(folder, request, plain_world, pair_world, prepare=None):
    def count(name, new_world, serve):
        return count_bytecodes(folder / name, NAMES, new_world, serve, prepare=prepare)

    plain = count("plain", plain_world, serving_plain(request))
    for connector in CONNECTORS:
        pair = count(connector, pair_world(connector), serving_pair(request))
        assert plain < pair < MOST * plain, connector


def test_the_cost_of_a_clients_own_id_is_bounded(tmp_path):
    """Also if the response has the id, which has to be replaced."""
    proxys_id = b"0" * 32
    request = chat_request(body=b'{"messages": [], "rid": "mine"}')

    def serve(world, client):
        world.client_sends(client, request)
        world.prefill_responds(response_with(PREFILL))
        world.decode_responds(response_with(b'{"id": "%b"}' % proxys_id))

    plain = count_bytecodes(
        tmp_path / "plain",
        NAMES,
        lambda listeners: World(listeners, "[server]\n"),
        serving_plain(request),
    )
    with_id = count_bytecodes(tmp_path / "with_id", NAMES, world_of("sglang"), serve)
    assert plain < with_id < MAX_WITH_ID * plain


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_cost_of_a_pair_is_bounded(tmp_path, ranks):
    def plain_world(listeners):
        fields = {name: {"ranks": ranks} for name in NAMES}
        return World(listeners, "[server]\n", fields=fields)

    assert_bound(tmp_path, small_post(), plain_world, lambda connector: world_of(connector, ranks))


def test_the_cost_of_a_pair_with_an_alias_and_worker_keys_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def prepare(world):
        for at in range(len(NAMES)):
            world.change_worker(at, api_key_env="KEY_OF_A_WORKER")

    def plain_world(listeners):
        return World(listeners, ALIAS)

    def pair_world(connector):
        return lambda listeners: world_of(connector)(listeners, ALIAS)

    request = small_post(b"authorization: Bearer client", model="alias")
    assert_bound(tmp_path, request, plain_world, pair_world, prepare)
