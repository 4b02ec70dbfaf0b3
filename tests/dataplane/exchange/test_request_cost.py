"""What aliases, ranks, keys and traces cost a small POST, in bytecodes: these do not depend on the
machine's load."""

from hashlib import sha256

import pytest

from omni_proxy import native
from omni_proxy.api_keys.caller import MAX_UNSORTED
from tests.dataplane.both_drivers import World
from tests.dataplane.bytecodes import WHOLE, count_bytecodes, small_post
from tests.dataplane.disaggregation.pair_world import answer

pytestmark = pytest.mark.skipif(native.build() == "native", reason="compiled code has no bytecodes")
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


CALLER = f"""
[[keys]]
name = "team"
key_sha256 = "{sha256(b"key").hexdigest()}"
"""
MOST = "max_inflight = 100\n"
REQUESTS = "requests_per_minute = 100000\n"
TOKENS = "tokens_per_minute = 100000000\n"
TRACED = "[observe]\notlp_endpoint = 'http://127.0.0.1:1'\ntrace_sampling = 0\n"
USAGE = answer(b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}')


@pytest.fixture
def counted_with_ends(tmp_path, monkeypatch):
    """With what is counted of so many requests together."""
    monkeypatch.setattr("tests.dataplane.bytecodes.REQUESTS", MAX_UNSORTED)

    def count(name, config=""):
        request, served = small_post(b"authorization: Bearer key"), 0

        def serve(world, client):
            nonlocal served
            world.ask(client, request)
            world.answer(USAGE)
            served += 1
            if served % MAX_UNSORTED == 0:
                world.dataplane.settings.callers.publish()

        return count_bytecodes(tmp_path / name, "a", lambda each: World(each, config), serve)

    return count


def test_a_key_its_limits_and_a_trace_that_is_not_sampled_cost_little(counted_with_ends):
    plain = counted_with_ends("plain")
    assert plain < counted_with_ends("key", CALLER) < 1.035 * plain
    assert counted_with_ends("most", CALLER + MOST) < 1.035 * plain
    assert counted_with_ends("rate", CALLER + MOST + REQUESTS) < 1.06 * plain
    assert counted_with_ends("all", CALLER + MOST + REQUESTS + TOKENS) < 1.15 * plain
    assert plain < counted_with_ends("trace", TRACED) < plain + 20
