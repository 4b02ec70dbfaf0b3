"""The trees over time: new and removed workers, new parameters, eviction."""

import random

from omni_proxy.config.schema import CacheAwareConfig, RoutingConfig
from omni_proxy.routing.policies import build_policy
from tests.routing.policies.chats import (
    LONG,
    branch_of,
    cache_aware,
    chat,
    first,
    unrelated,
    workers,
)


def fleet_with_a_new_worker(share, others=3):
    """All workers except the last one have trees."""
    policy = cache_aware(warmup_share=share)
    fleet = workers(*[0] * (others + 1))
    for text in unrelated(30 * others, seed=2):
        policy.pick(fleet[:others], chat(text))
    return policy, fleet


def picks_of_the_new_worker(policy, fleet, requests):
    texts = unrelated(requests, seed=3)
    return sum(policy.pick(fleet, chat(text)) is fleet[-1] for text in texts)


def test_a_new_worker_gets_at_most_its_share_of_misses_while_it_warms_up():
    assert picks_of_the_new_worker(*fleet_with_a_new_worker(0.5), 20) == 10
    assert picks_of_the_new_worker(*fleet_with_a_new_worker(0.34), 21) == 7


def test_the_share_is_never_below_an_equal_share():
    assert picks_of_the_new_worker(*fleet_with_a_new_worker(0.01), 20) == 5


def test_without_a_share_only_the_smallest_tree_decides():
    assert picks_of_the_new_worker(*fleet_with_a_new_worker(0.0), 20) == 20


def test_a_new_worker_ends_with_a_tree_as_large_as_the_others():
    policy, fleet = fleet_with_a_new_worker(0.5)
    picks_of_the_new_worker(policy, fleet, 400)
    sizes = policy.stats()["tree_size_by_worker"].values()
    assert max(sizes) - min(sizes) <= 400


def test_prefixes_of_a_removed_worker_match_no_worker():
    policy, fleet = cache_aware(), workers(0, 0)
    policy.pick(fleet[:1], chat(LONG))
    policy.forget_worker(fleet[0])
    policy.pick(fleet[:1], chat("a short one"))
    assert policy.pick(fleet, chat(LONG)) is fleet[1]
    assert branch_of(policy) == {"smallest_tree": 3}


def test_a_flushed_worker_warms_up_from_the_beginning():
    policy, fleet = fleet_with_a_new_worker(0.34)
    assert policy.pick(fleet, chat("something")) is fleet[-1]
    assert policy.preview_pick(fleet, chat("another"))[0] is not fleet[-1]
    assert "warms up" in policy.preview_pick(fleet, chat("another"))[1]
    policy.forget_worker(fleet[-1])
    assert policy.pick(fleet, chat("another")) is fleet[-1]


def test_new_parameters_keep_the_tree():
    policy, fleet = cache_aware(), workers(0, 0)
    home = policy.pick(fleet, chat(LONG))
    rules = CacheAwareConfig(balance_abs_threshold=1, cache_threshold=0.9)
    assert policy.reconfigure(RoutingConfig(policy="cache_aware", cache_aware=rules))
    assert policy.preview_pick(fleet, chat(LONG))[0] is home
    assert policy.preview_pick(fleet, chat(LONG * 2))[1].startswith("only ")
    home.in_flight = 2
    assert policy.pick(fleet, chat(LONG)) is not home
    round_robin = RoutingConfig(policy="round_robin")
    assert build_policy(round_robin, first, 0.0, policy) is not policy


def test_new_thresholds_apply_to_the_next_pick_of_a_large_fleet():
    policy, fleet = cache_aware(), workers(*[0] * 130)
    home = policy.pick(fleet, chat(LONG))
    home.in_flight = 9
    assert policy.pick(fleet, chat(LONG)) is home
    rules = CacheAwareConfig(balance_abs_threshold=1)
    assert policy.reconfigure(RoutingConfig(policy="cache_aware", cache_aware=rules))
    assert policy.pick(fleet, chat(LONG)) is not home


def test_a_lowered_tree_size_is_enforced_before_the_interval_ends():
    policy, fleet = cache_aware(), workers(0, 0)
    for text in unrelated(50):
        policy.pick(fleet, chat(text))
    policy.reconfigure(
        RoutingConfig(policy="cache_aware", cache_aware=CacheAwareConfig(max_tree_size=1000))
    )
    policy.maintain(1.0)
    assert 0 < policy.stats()["tree_size"] <= 1000


def test_the_tree_is_trimmed_once_per_interval():
    policy, fleet = cache_aware(max_tree_size=1000, eviction_interval_secs=10), workers(0)
    for text in unrelated(5, length=210):
        policy.pick(fleet, chat(text))
    policy.maintain(9.9)
    assert policy.stats()["tree_size"] > 1000
    policy.maintain(10.1)
    assert policy.stats()["tree_size"] <= 1000


def test_a_shortened_interval_applies_at_once():
    policy, fleet = cache_aware(max_tree_size=1000, eviction_interval_secs=1e6), workers(0)
    for text in unrelated(5, length=210):
        policy.pick(fleet, chat(text))
    policy.maintain(0.1)
    rules = CacheAwareConfig(max_tree_size=1100, eviction_interval_secs=5)
    policy.reconfigure(RoutingConfig(policy="cache_aware", cache_aware=rules))
    policy.pick(fleet, chat("z" * 70))
    assert policy.stats()["tree_size"] > 1100
    policy.maintain(5.2)
    assert policy.stats()["tree_size"] <= 1100


def test_an_hour_of_endings_of_one_prompt_is_bounded_and_keeps_the_prompt():
    policy, fleet = cache_aware(max_tree_size=100_000), workers(0, 0)
    chance = random.Random(5)
    home = policy.pick(fleet, chat(LONG))
    for quarter in range(4 * 3600):
        policy.maintain(quarter / 4)
        if quarter % 4 == 0:
            tail = "".join(chance.choices("etaoin ", k=150))
            assert policy.pick(fleet, chat(LONG + tail)) is home
            policy.pick(fleet, chat(tail))
            assert policy.stats()["tree_size"] <= 125_000
    assert policy.stats()["picks"]["matched"] >= 3600
    while policy.stats()["tree_size"] > 100_000:
        policy.maintain(3661.0)


def test_a_new_policy_has_an_empty_tree():
    fleet = workers(0, 0)
    policy = build_policy(RoutingConfig(policy="cache_aware"), first, 0.0)
    assert policy.stats()["matched_ratio"] is None
    policy.record_pick(fleet[1], chat(LONG))
    assert policy.pick(fleet, chat(LONG)) is fleet[1]
    assert policy.stats()["matched_ratio"] == 1.0
