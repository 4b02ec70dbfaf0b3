"""What a request in two legs costs beside a plain one, in bytecodes: these do not depend on the
machine's load. The goal of docs/performance.md, at most 2.2 times, is for CPU time."""

import pytest

from omni_proxy import native
from tests.dataplane.both_drivers import World, chat_request
from tests.dataplane.bytecodes import WHOLE, count_bytecodes, small_post
from tests.dataplane.disaggregation.pair_world import NAMES, PREFILL, answer, world_of

pytestmark = pytest.mark.skipif(native.build() == "native", reason="compiled code has no bytecodes")
MOST = 2.1
MOST_WITH_ID = 2.8
CONNECTORS = ("sglang", "nixl", "mooncake")
ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "target" }]
"""


def serving_plain(request):
    def serve(world, client):
        world.ask(client, request)
        world.answer(WHOLE)

    return serve


def serving_pair(request):
    def serve(world, client):
        world.ask(client, request)
        world.prefill(answer(PREFILL))
        world.decode(WHOLE)

    return serve


def assert_bound(folder, request, plain_world, pair_world, prepare=None):
    def counted(name, new_world, serve):
        return count_bytecodes(folder / name, NAMES, new_world, serve, prepare=prepare)

    plain = counted("plain", plain_world, serving_plain(request))
    for connector in CONNECTORS:
        pair = counted(connector, pair_world(connector), serving_pair(request))
        assert plain < pair < MOST * plain, connector


def test_a_clients_own_id_costs_less_than_the_drivers_path(tmp_path):
    """Also where the answer has it, which is written anew."""
    id_of_ours = b"0" * 32
    request = chat_request(body=b'{"messages": [], "rid": "mine"}')

    def serve(world, client):
        world.ask(client, request)
        world.prefill(answer(PREFILL))
        world.decode(answer(b'{"id": "%b"}' % id_of_ours))

    plain = count_bytecodes(
        tmp_path / "plain", NAMES, lambda at: World(at, "[server]\n"), serving_plain(request)
    )
    with_id = count_bytecodes(tmp_path / "with_id", NAMES, world_of("sglang"), serve)
    assert plain < with_id < MOST_WITH_ID * plain


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_pair_takes_at_most_so_many_times_the_bytecodes_of_a_plain_request(tmp_path, ranks):
    def plain_world(listeners):
        fields = {name: {"ranks": ranks} for name in NAMES}
        return World(listeners, "[server]\n", fields=fields)

    assert_bound(tmp_path, small_post(), plain_world, lambda connector: world_of(connector, ranks))


def test_the_same_holds_for_an_alias_and_for_workers_with_keys_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def prepare(world):
        for at in range(len(NAMES)):
            world.change(at, api_key_env="KEY_OF_A_WORKER")

    def plain_world(listeners):
        return World(listeners, ALIAS)

    def pair_world(connector):
        return lambda listeners: world_of(connector)(listeners, ALIAS)

    request = small_post(b"authorization: Bearer theirs", model="alias")
    assert_bound(tmp_path, request, plain_world, pair_world, prepare)
