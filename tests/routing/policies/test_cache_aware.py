"""The pick by text: the worker that holds most of it, or one with a small tree."""

import random
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.body_fields import BodyFields
from omni_proxy.routing.inspect.requirements import Requirements
from tests.routing.policies.chats import (
    FALLBACKS,
    LONG,
    NEED,
    branch_of,
    cache_aware,
    chat,
    fleet_with_trees,
    unrelated,
    workers,
)


def test_a_repeated_text_is_routed_to_the_same_worker():
    policy, fleet = cache_aware(), workers(0, 0, 0)
    homes = {text: policy.pick(fleet, chat(text)) for text in unrelated(9)}
    for text, home in homes.items():
        assert policy.pick(fleet, chat(text + " and more")) is home
    assert branch_of(policy) == {"smallest_tree": 9, "matched": 9}


@pytest.mark.parametrize(("known", "same"), [(50, False), (51, True)])
def test_a_match_decides_above_the_threshold_and_not_at_it(known, same):
    policy, fleet = cache_aware(cache_threshold=0.5), workers(0, 0)
    home = policy.pick(fleet, chat("k" * known))
    request = chat("k" * known + "n" * (100 - known))
    assert (policy.preview_pick(fleet, request)[0] is home) is same


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_successive_unrelated_prompts_spread_evenly_over_idle_workers(fallback):
    policy, fleet = cache_aware(fallback=fallback), workers(0, 0, 0, 0)
    picked = Counter(policy.pick(fleet, chat(text)).url for text in unrelated(40))
    assert all(8 <= picked[worker.url] <= 12 for worker in fleet)


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_unrelated_prompts_spread_evenly_over_a_large_fleet(fallback):
    policy, fleet = cache_aware(fallback=fallback), workers(*[0] * 300)
    picked = Counter(policy.pick(fleet, chat(text)).url for text in unrelated(900))
    assert len(picked) == 300
    assert max(picked.values()) <= 5


def test_requests_with_a_prefix_that_all_workers_hold_are_spread_over_all():
    policy, fleet = cache_aware(), workers(*[0] * 300)
    (text,) = unrelated(1)
    for worker in fleet:
        policy.record_pick(worker, chat(text))
    assert {policy.pick(fleet, chat(text)) for _ in range(300)} == set(fleet)


def test_a_match_of_a_worker_that_is_not_a_candidate_is_ignored():
    policy, fleet = cache_aware(), workers(0, 0, 0)
    (text,) = unrelated(1)
    policy.record_pick(fleet[0], chat(text))
    policy.record_pick(fleet[1], chat(text[: len(text) * 3 // 4]))
    others = fleet[1:]
    assert policy.pick(others, chat(text)) is fleet[1]
    policy.forget_worker(fleet[1])
    policy.record_pick(fleet[2], chat(text))
    assert policy.pick(others, chat(text)) is fleet[2]


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_the_common_role_of_short_prompts_is_no_match(fallback):
    policy, fleet = cache_aware(fallback=fallback), workers(0, 0, 0, 0)
    picked = Counter(policy.pick(fleet, chat(letter)).url for letter in string.ascii_letters[:40])
    assert set(picked.values()) == {10}


def test_a_miss_is_routed_to_the_smallest_tree():
    policy, fleet = cache_aware(), workers(0, 9)
    big, small = unrelated(2)
    assert policy.pick(fleet[:1], chat(big * 2)) is fleet[0]
    assert policy.pick(fleet[1:], chat(small)) is fleet[1]
    assert policy.pick(fleet, chat("something else")) is fleet[1]


@pytest.mark.parametrize(("larger", "chosen"), [(613, 0), (614, 1)])
def test_among_trees_of_similar_size_the_shortest_queue_decides(larger, chosen):
    policy, fleet = fleet_with_trees((larger, 400), (0, 1))
    assert policy.pick(fleet, chat("0" * 12)) is fleet[chosen]


def test_of_small_trees_with_equal_queues_the_smallest_is_picked():
    policy, fleet = fleet_with_trees((810, 800, 805), (1, 1, 1))
    assert policy.pick(fleet, chat("0" * 12)) is fleet[1]


sizes_and_loads = st.lists(
    st.tuples(st.sampled_from((0, 300, 450, 600, 700, 719, 720, 900, 1020)), st.integers(0, 3)),
    min_size=1, max_size=6,
)  # fmt: skip


@given(sizes_and_loads, st.integers(1, 400))
def test_of_the_small_trees_the_least_loaded_and_then_smallest_is_picked(rows, length):
    policy, fleet = fleet_with_trees(*zip(*rows, strict=True))
    bound = min(size for size, _ in rows) * 1.5 + length + 1
    ranks = [(load, size) if size <= bound else (9, 0) for size, load in rows]
    assert ranks[fleet.index(policy.pick(fleet, chat("0" * length)))] == min(ranks)


def test_misses_rarely_wait_at_one_worker_while_another_is_idle():
    policy, fleet, chance = cache_aware(), workers(0, 0, 0, 0), random.Random(5)
    running, waited = [], 0
    for text in unrelated(72):
        idle = any(not worker.in_flight for worker in fleet)
        chosen = policy.pick(fleet, chat(text))
        waited += idle and chosen.in_flight > 0
        chosen.in_flight += 1
        running.append(chosen)
        if len(running) == len(fleet):
            running.pop(chance.randrange(len(running))).in_flight -= 1
    assert waited <= 10


def test_a_miss_is_routed_to_the_least_loaded_if_configured():
    policy, fleet = cache_aware(fallback="least_loaded"), workers(4, 3, 5)
    assert [policy.pick(fleet, chat(text)) for text in unrelated(3)] == [fleet[1]] * 3


def test_if_the_best_holder_is_not_a_candidate_the_next_best_is_picked():
    policy, fleet = cache_aware(), workers(0, 0, 0)
    policy.pick(fleet[:1], chat(LONG * 2))
    policy.pick(fleet[1:2], chat(LONG * 2 + "?"))
    policy.pick(fleet[1:2], chat(LONG + "!"))
    assert policy.pick(fleet[1:], chat(LONG * 2)) is fleet[1]
    assert policy.pick(fleet[2:], chat(LONG * 2)) is fleet[2]


def test_models_that_workers_name_have_separate_trees():
    policy = cache_aware()
    serving_m, serving_n = workers(0, 0, model="m"), workers(0, 0, model="n")
    home = policy.pick(serving_m, chat(LONG, "m"))
    assert policy.pick(serving_m, chat(LONG, "m")) is home
    policy.pick(serving_n, chat(LONG, "n"))
    assert branch_of(policy) == {"smallest_tree": 2, "matched": 1}


def test_models_that_only_clients_name_have_no_separate_trees():
    policy, fleet = cache_aware(), workers(0, 0)
    homes = {policy.pick(fleet, chat(LONG, f"model {number}")) for number in range(50)}
    assert len(homes) == 1
    assert policy.stats()["tree_size"] < len(LONG) + 8


def test_a_request_without_text_gets_the_shortest_queue_and_is_not_stored():
    policy, fleet = cache_aware(), workers(2, 1, 1)
    picked = Counter(
        policy.pick(fleet, need).url for need in [NEED, Requirements(0, decoded=BodyFields())] * 4
    )
    assert picked == {fleet[1].url: 4, fleet[2].url: 4}
    assert (branch_of(policy), policy.stats()["tree_size"]) == ({"no_text": 8}, 0)
