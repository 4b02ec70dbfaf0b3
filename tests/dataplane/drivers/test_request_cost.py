"""The bytecodes that aliases, ranks, keys and traces add to a small POST: they do not depend on the
machine's load."""

from hashlib import sha256

import pytest

from omni_proxy import native
from omni_proxy.api_keys.caller_limits import MAX_UNCOUNTED
from tests.dataplane.both_drivers import World
from tests.dataplane.bytecodes import OK_RESPONSE, count_bytecodes, small_post
from tests.dataplane.disaggregation.pair_world import response_with

pytestmark = pytest.mark.skipif(native.build() == "native", reason="compiled code has no bytecodes")
NAMES = "abcd"
ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "target" }]
"""
KEY = {name: {"api_key_env": "KEY_OF_A_WORKER"} for name in NAMES}
RANKS = {name: {"ranks": 2} for name in NAMES}
DISABLED_WITH_RANKS = {"a": {"ranks": 2, "disabled": True}}


@pytest.fixture
def count_with(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_WORKER", "secret")

    def count(name, *fields, model="m", config="", workers=None):
        request = small_post(*fields, model=model)

        def serve(world, client):
            world.client_sends(client, request)
            world.worker_responds(OK_RESPONSE)

        def new_world(listeners):
            return World(listeners, config, fields=workers)

        return count_bytecodes(tmp_path / name, NAMES, new_world, serve)

    return count


# To decode the fields of the prompt later takes some bytecodes and saves much more time. Aliases and
# ranks turn it off, which must not hide what they add.
DECODES_LATER = 7


@pytest.mark.parametrize(
    ("most", "saved", "feature"),
    [
        (19, DECODES_LATER, {"config": ALIAS}),  # the request names a model
        (38, DECODES_LATER, {"workers": DISABLED_WITH_RANKS}),
        (291, DECODES_LATER, {"workers": RANKS}),
        (873, DECODES_LATER, {"config": ALIAS, "model": "alias"}),
        (77, 0, {"workers": KEY}),
    ],
    ids=["aliases", "disabled_worker_with_ranks", "ranks", "to_an_alias", "keys_of_workers"],
)
def test_the_cost_of_a_feature_is_bounded(count_with, most, saved, feature):
    added = count_with("with", **feature) - count_with("plain") + saved
    assert 0 < added < most


def test_a_clients_key_costs_nothing_if_the_worker_has_its_own(count_with):
    without = count_with("without", workers=KEY)
    assert count_with("with", b"authorization: Bearer client", workers=KEY) == without


CALLER = f"""
[[keys]]
name = "team"
key_sha256 = "{sha256(b"key").hexdigest()}"
"""
INFLIGHT = "max_inflight = 100\n"
REQUESTS = "requests_per_minute = 100000\n"
TOKENS = "tokens_per_minute = 100000000\n"
TRACED = "[observe]\notlp_endpoint = 'http://127.0.0.1:1'\ntrace_sampling = 0\n"
USAGE = response_with(b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}')


@pytest.fixture
def count_with_publishing(tmp_path, monkeypatch):
    """Includes publishing the counts of MAX_UNCOUNTED requests."""
    monkeypatch.setattr("tests.dataplane.bytecodes.REQUESTS", MAX_UNCOUNTED)

    def count(name, config=""):
        request, served = small_post(b"authorization: Bearer key"), 0

        def serve(world, client):
            nonlocal served
            world.client_sends(client, request)
            world.worker_responds(USAGE)
            served += 1
            if served % MAX_UNCOUNTED == 0:
                world.dataplane.settings.callers.publish()

        return count_bytecodes(
            tmp_path / name, "a", lambda listeners: World(listeners, config), serve
        )

    return count


def test_the_cost_of_a_key_its_limits_and_an_unsampled_trace_is_bounded(count_with_publishing):
    plain = count_with_publishing("plain")
    assert plain < count_with_publishing("key", CALLER) < 1.035 * plain
    assert count_with_publishing("most", CALLER + INFLIGHT) < 1.035 * plain
    assert count_with_publishing("rate", CALLER + INFLIGHT + REQUESTS) < 1.06 * plain
    assert count_with_publishing("all", CALLER + INFLIGHT + REQUESTS + TOKENS) < 1.15 * plain
    assert plain < count_with_publishing("trace", TRACED) < plain + 35
