"""The load at which a match no longer decides, among holders and against other workers."""

from collections import Counter

import pytest

from tests.routing.policies.chats import (
    LONG,
    branch_of,
    cache_aware,
    chat,
    unrelated,
    weighted,
    workers,
)


def test_an_imbalance_of_a_large_fleet_is_noticed_within_a_few_picks():
    policy, fleet = cache_aware(), workers(*[0] * 300)
    (text,) = unrelated(1)
    home = policy.pick(fleet, chat(text))
    home.in_flight = 100
    homes = [policy.pick(fleet, chat(text)) for _ in range(8)]
    assert homes[0] is home
    assert homes[-1] is not home


@pytest.mark.parametrize(
    ("loads", "even"),
    [((32, 0), True), ((33, 0), False), ((1033, 1000), False), ((1032, 1000), True)],
)
def test_the_absolute_gap_must_be_exceeded(loads, even):
    policy, fleet = cache_aware(), workers(*loads)
    policy.pick(fleet[:1], chat(LONG))
    assert (policy.pick(fleet, chat(LONG)) is fleet[0]) is even


@pytest.mark.parametrize(("loads", "even"), [((150, 100), True), ((151, 100), False)])
def test_the_ratio_must_be_exceeded(loads, even):
    policy, fleet = cache_aware(balance_rel_threshold=1.5), workers(*loads)
    policy.pick(fleet[:1], chat(LONG))
    assert (policy.pick(fleet, chat(LONG)) is fleet[0]) is even


def test_a_request_moved_because_of_load_is_stored_for_its_new_worker():
    policy, fleet = cache_aware(balance_abs_threshold=4), workers(0, 0)
    policy.pick(fleet[:1], chat(LONG))
    fleet[0].in_flight = 5
    assert policy.pick(fleet, chat(LONG)) is fleet[1]
    fleet[0].in_flight, fleet[1].in_flight = 2, 1
    assert policy.pick(fleet, chat(LONG)) is fleet[1]
    assert branch_of(policy) == {"smallest_tree": 1, "imbalanced": 1, "matched": 1}


def held_by_two(**rules):
    policy, fleet = cache_aware(**rules), workers(3, 1, 0)
    for holder in fleet[:2]:
        policy.pick([holder], chat(LONG))
    return policy, fleet


def test_of_all_holders_the_least_loaded_is_picked():
    policy, fleet = held_by_two()
    assert [policy.pick(fleet, chat(LONG)) for _ in range(3)] == [fleet[1]] * 3
    fleet[1].in_flight = 3
    assert {policy.pick(fleet, chat(LONG)) for _ in range(2)} == set(fleet[:2])


def test_workers_with_the_longest_match_are_picked_in_turn_at_any_load():
    policy, fleet = held_by_two(holders="longest")
    assert {policy.pick(fleet, chat(LONG)) for _ in range(2)} == set(fleet[:2])


@pytest.mark.parametrize("holders", ["all", "longest"])
def test_a_longer_match_beats_a_lower_load(holders):
    policy, fleet = cache_aware(holders=holders), workers(9, 0)
    for number, worker in enumerate(fleet):
        policy.pick([worker], chat(LONG + "!" * (10 - number)))
    assert policy.pick(fleet, chat(LONG + "!" * 10)) is fleet[0]


def test_a_global_spill_also_moves_requests_of_workers_with_low_load():
    policy, fleet = cache_aware(spill="global"), workers(1, 99, 0)
    policy.pick(fleet[:1], chat(LONG))
    assert policy.pick(fleet, chat(LONG)) is fleet[2]


def test_the_spill_of_the_chosen_worker_moves_only_its_requests():
    policy, fleet = cache_aware(spill="chosen"), workers(1, 99, 0)
    policy.pick(fleet[:1], chat(LONG))
    policy.pick(fleet[1:2], chat("x" * 99))
    assert policy.pick(fleet, chat(LONG)) is fleet[0]
    assert policy.pick(fleet, chat("x" * 99)) is fleet[2]
    assert branch_of(policy) == {"smallest_tree": 2, "matched": 1, "spilled": 1}


@pytest.mark.parametrize(("load", "stays"), [(48, True), (49, False)])
def test_the_chosen_worker_spills_above_the_mean_and_the_gap(load, stays):
    # (48 + 16) / 4 = 16, and 48 is no more than 16 + 32; 49 is more than 16.25 + 32.
    policy = cache_aware(spill="chosen", balance_rel_threshold=2.0)
    fleet = workers(load, 16, 0, 0)
    policy.pick(fleet[:1], chat(LONG))
    assert (policy.pick(fleet, chat(LONG)) is fleet[0]) is stays


def test_loads_and_tree_sizes_are_relative_to_the_weight():
    policy, fleet = cache_aware(fallback="least_loaded"), weighted(1, 3)
    fleet[0].in_flight, fleet[1].in_flight = 2, 4
    assert policy.pick(fleet, chat("anything")) is fleet[1]
    policy, fleet = cache_aware(warmup_share=0.0), weighted(1, 3)
    picked = Counter(policy.pick(fleet, chat(text)).url for text in unrelated(40))
    assert 8 <= picked[fleet[0].url] <= 12


def test_loads_in_proportion_to_the_weights_are_no_imbalance():
    policy, fleet = cache_aware(), weighted(1, 9)
    policy.pick(fleet[:1], chat(LONG))
    fleet[0].in_flight, fleet[1].in_flight = 10, 90
    assert policy.pick(fleet, chat(LONG)) is fleet[0]
