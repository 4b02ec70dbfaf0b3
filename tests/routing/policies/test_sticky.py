import random

import pytest

from omni_proxy.config.schema import CacheAwareConfig, RoutingConfig
from omni_proxy.routing import policies
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.sticky import DROPPED_PER_SLICE
from tests.routing.policies.chats import NEED, build, chat, first, workers

NAMES = (
    "round_robin", "random", "least_request", "power_of_two", "cache_aware", "consistent_hashing",
    "prefix_hash",
)  # fmt: skip


def sticky(policy="round_robin", **more):
    return build(policy, sticky_sessions=True, **more)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_stays_with_its_worker_under_any_policy(name):
    policy, fleet = sticky(name, below=random.Random(4).randrange), workers(0, 0, 0)
    assert (policy.name, policy.needs_affinity_key) == (name, True)
    home = policy.pick(fleet, chat("hello", key="me"))
    for number in range(9):
        home.in_flight += 5
        assert policy.pick(fleet, chat(f"{number}" * 50, key="me")) is home


def test_a_worker_that_is_no_candidate_loses_the_session_for_good():
    policy, fleet = sticky(), workers(0, 0, 0)
    home = policy.pick(fleet, Requirements(0, affinity_key="me"))
    left = [worker for worker in fleet if worker is not home]
    new = policy.pick(left, Requirements(0, affinity_key="me"))
    assert new is not home
    assert policy.pick(fleet, Requirements(0, affinity_key="me")) is new


def test_requests_without_a_key_go_by_the_policy_below():
    policy, fleet = sticky(), workers(0, 0, 0)
    assert [policy.pick(fleet, NEED) for _ in range(3)] == fleet
    assert policy.stats()["sticky"]["sessions"] == 0


def test_an_idle_session_is_forgotten_and_a_used_one_is_not():
    policy, fleet = sticky(sticky_idle_secs=10), workers(0, 0)
    policy.pick(fleet, Requirements(0, affinity_key="idle"))
    policy.pick(fleet, Requirements(0, affinity_key="used"))
    policy.maintain(8.0)
    policy.pick(fleet, Requirements(0, affinity_key="used"))
    policy.maintain(11.0)
    assert policy.stats()["sticky"]["sessions"] == 1
    assert (
        policy.preview_pick(fleet, Requirements(0, affinity_key="used"))[1]
        == "its session stays there"
    )
    assert policy.preview_pick(fleet, Requirements(0, affinity_key="idle"))[1].startswith(
        "a new session: "
    )


def test_an_idle_session_that_was_not_dropped_yet_counts_no_more():
    policy, fleet = sticky(sticky_idle_secs=10), workers(0, 0)
    for number in range(DROPPED_PER_SLICE + 2):
        policy.pick(fleet, Requirements(0, affinity_key=f"{number}"))
    policy.maintain(11.0)
    assert policy.stats()["sticky"]["sessions"] == 2
    last = Requirements(0, affinity_key=f"{DROPPED_PER_SLICE + 1}")
    assert policy.preview_pick(fleet, last)[1].startswith("a new session")


def test_a_session_without_an_end_is_kept():
    policy, fleet = sticky(sticky_idle_secs=0), workers(0, 0)
    policy.pick(fleet, Requirements(0, affinity_key="me"))
    policy.maintain(1e9)
    assert policy.stats()["sticky"]["sessions"] == 1


def test_only_so_many_sessions_are_remembered_those_used_last():
    policy, fleet = sticky(sticky_max=3), workers(0, 0)
    for key in ("a", "b", "c", "a", "d"):
        policy.pick(fleet, Requirements(0, affinity_key=key))
    told = {key: policy.preview_pick(fleet, Requirements(0, affinity_key=key))[1] for key in "abcd"}
    assert [key for key, why in told.items() if why == "its session stays there"] == list("acd")


def test_the_cache_aware_policy_learns_of_what_sessions_send():
    policy, fleet = sticky("cache_aware"), workers(0, 0)
    home = policy.pick(fleet, chat("one", key="me"))
    policy.pick(fleet, chat("w" * 99, key="me"))
    assert policy.preview_pick(fleet, chat("w" * 99))[0] is home
    assert policy.explain_pick(fleet, chat("w" * 99))["matched_bytes"][home.url] == 99


def test_a_preview_begins_no_session():
    policy, fleet = sticky(), workers(0, 0, 0)
    chosen = policy.preview_pick(fleet, Requirements(0, affinity_key="me"))[0]
    assert policy.stats()["sticky"] == {"sessions": 0, "kept": 0, "begun": 0}
    assert policy.pick(fleet, Requirements(0, affinity_key="me")) is chosen


def routing(policy="cache_aware", *, sessions, **more):
    return RoutingConfig(policy=policy, sticky_sessions=sessions, **more)


def test_switching_sessions_keeps_the_tree_and_switching_policies_keeps_the_sessions():
    fleet = workers(0, 0)
    plain = policies.build_policy(routing(sessions=False), first, 0.0)
    home = plain.pick(fleet, chat("w" * 99))
    with_sessions = policies.build_policy(routing(sessions=True), first, 0.0, plain)
    assert with_sessions.pick(fleet, chat("w" * 99, key="me")) is home
    at_random = policies.build_policy(routing("random", sessions=True), first, 0.0, with_sessions)
    assert at_random.name == "random"
    assert at_random.pick(fleet, Requirements(0, affinity_key="me")) is home
    bare = policies.build_policy(routing("random", sessions=False), first, 0.0, at_random)
    assert (bare.name, bare.needs_affinity_key) == ("random", False)


def test_a_policy_whose_name_stays_is_reconfigured_in_place():
    policy = sticky("cache_aware")
    rules = CacheAwareConfig(max_tree_size=77)
    changed = routing(sessions=True, sticky_max=5, cache_aware=rules)
    assert policies.build_policy(changed, first, 0.0, policy) is policy
    assert policy.stats()["max_tree_size"] == 77
    without = policies.build_policy(routing(sessions=False), first, 0.0, policy)
    assert without is policy.inner


def test_forgetting_reaches_the_policy_below():
    policy, fleet = sticky("cache_aware"), workers(0, 0)
    home = policy.pick(fleet, chat("w" * 99, key="me"))
    policy.forget_worker(home)
    assert policy.explain_pick(fleet, chat("w" * 99))["matched_bytes"][home.url] == 0
    assert policy.pick(fleet, chat("w" * 99, key="me")) is home
