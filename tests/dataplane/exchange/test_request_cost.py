"""What aliases, ranks and workers with keys of their own cost a small POST, in bytecodes: these do
not depend on the machine's load."""

import pytest

from tests.dataplane.both_drivers import World
from tests.dataplane.bytecodes import WHOLE, count_bytecodes, small_post

NAMES = "abcd"
ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "target" }]
"""
KEY = {name: {"api_key_env": "KEY_OF_A_WORKER"} for name in NAMES}
RANKS = {name: {"ranks": 2} for name in NAMES}
ELSEWHERE = {"a": {"ranks": 2, "disabled": True}}


@pytest.fixture
def counted(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def count(name, *fields, model="m", config="", workers=None):
        request = small_post(*fields, model=model)

        def serve(world, client):
            world.ask(client, request)
            world.answer(WHOLE)

        def new_world(listeners):
            return World(listeners, config, fields=workers)

        return count_bytecodes(tmp_path / name, NAMES, new_world, serve)

    return count


@pytest.mark.parametrize(
    ("most", "feature"),
    [
        (1.01, {"config": ALIAS}),  # the request names a model
        (1.01, {"workers": ELSEWHERE}),
        (1.15, {"workers": RANKS}),
        (1.45, {"config": ALIAS, "model": "alias"}),
        (1.04, {"workers": KEY}),
    ],
    ids=["aliases", "ranks_elsewhere", "ranks", "to_an_alias", "keys_of_workers"],
)
def test_a_small_post_takes_at_most_so_many_times_the_bytecodes(counted, most, feature):
    plain, with_feature = counted("plain"), counted("with", **feature)
    assert plain < with_feature < most * plain


def test_the_clients_own_key_costs_nothing_more_where_the_worker_has_one(counted):
    without = counted("without", workers=KEY)
    assert counted("with", b"authorization: Bearer theirs", workers=KEY) == without
