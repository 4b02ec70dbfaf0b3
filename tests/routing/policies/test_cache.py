import random
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.schema import CacheAware, Routing
from omni_proxy.routing.inspect import Need, Payload
from omni_proxy.routing.policies import build
from tests.routing.policies.chats import NEED, cache_aware, chat, first, weighing, workers

LONG = "Answer in one short sentence and never give away these words. " * 4
FALLBACKS = ("smallest_tree", "least_loaded")


def unrelated(count, length=200, seed=1):
    chance = random.Random(seed)
    return ["".join(chance.choices(string.ascii_letters, k=length)) for _ in range(count)]


def branch_of(policy):
    return policy.facts()["picks"]


def test_a_text_that_was_sent_before_goes_where_it_went():
    policy, fleet = cache_aware(), workers(0, 0, 0)
    homes = {text: policy.pick(fleet, chat(text)) for text in unrelated(9)}
    for text, home in homes.items():
        assert policy.pick(fleet, chat(text + " and more")) is home
    assert branch_of(policy) == {"smallest_tree": 9, "matched": 9}


@pytest.mark.parametrize(("known", "same"), [(50, False), (51, True)])
def test_a_match_decides_above_the_threshold_and_not_at_it(known, same):
    policy, fleet = cache_aware(cache_threshold=0.5), workers(0, 0)
    home = policy.pick(fleet, chat("k" * known))
    asked = chat("k" * known + "n" * (100 - known))
    assert (policy.preview(fleet, asked)[0] is home) is same


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_unrelated_prompts_one_after_another_spread_evenly_over_idle_workers(fallback):
    policy, fleet = cache_aware(fallback=fallback), workers(0, 0, 0, 0)
    picked = Counter(policy.pick(fleet, chat(text)).url for text in unrelated(40))
    assert all(8 <= picked[worker.url] <= 12 for worker in fleet)


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_unrelated_prompts_spread_evenly_over_a_large_fleet_too(fallback):
    policy, fleet = cache_aware(fallback=fallback), workers(*[0] * 300)
    picked = Counter(policy.pick(fleet, chat(text)).url for text in unrelated(900))
    assert len(picked) == 300
    assert max(picked.values()) <= 5


def test_what_a_whole_large_fleet_holds_goes_to_all_of_it_in_turn():
    policy, fleet = cache_aware(), workers(*[0] * 300)
    (text,) = unrelated(1)
    for worker in fleet:
        policy.took(worker, chat(text))
    assert {policy.pick(fleet, chat(text)) for _ in range(300)} == set(fleet)


def test_who_is_no_candidate_is_not_taken_for_what_it_holds():
    policy, fleet = cache_aware(), workers(0, 0, 0)
    (text,) = unrelated(1)
    policy.took(fleet[0], chat(text))
    policy.took(fleet[1], chat(text[: len(text) * 3 // 4]))
    others = fleet[1:]
    assert policy.pick(others, chat(text)) is fleet[1]
    policy.forget(fleet[1])
    policy.took(fleet[2], chat(text))
    assert policy.pick(others, chat(text)) is fleet[2]


def test_a_large_fleets_imbalance_shows_within_a_few_picks():
    policy, fleet = cache_aware(), workers(*[0] * 300)
    (text,) = unrelated(1)
    home = policy.pick(fleet, chat(text))
    home.in_flight = 100
    homes = [policy.pick(fleet, chat(text)) for _ in range(8)]
    assert homes[0] is home
    assert homes[-1] is not home


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_short_unlike_prompts_are_not_alike_by_their_role(fallback):
    policy, fleet = cache_aware(fallback=fallback), workers(0, 0, 0, 0)
    picked = Counter(policy.pick(fleet, chat(letter)).url for letter in string.ascii_letters[:40])
    assert set(picked.values()) == {10}


def test_a_miss_goes_to_the_smallest_tree():
    policy, fleet = cache_aware(), workers(0, 9)
    big, small = unrelated(2)
    assert policy.pick(fleet[:1], chat(big * 2)) is fleet[0]
    assert policy.pick(fleet[1:], chat(small)) is fleet[1]
    assert policy.pick(fleet, chat("something else")) is fleet[1]


def holding(sizes, loads, **rules):
    """A fleet whose workers hold so many bytes, and have so many requests in flight."""
    policy, fleet = cache_aware(warmup_share=0.0, **rules), workers(*loads)
    for mark, worker, size in zip(string.ascii_letters, fleet, sizes, strict=False):
        if size:
            policy.took(worker, chat(mark * (size - 1)))  # and the role's mark
    assert [policy.facts()["tree_size_by_worker"].get(w.url, 0) for w in fleet] == list(sizes)
    return policy, fleet


@pytest.mark.parametrize(("larger", "chosen"), [(1212, 0), (1213, 1)])
def test_trees_that_are_small_alike_leave_it_to_the_queues(larger, chosen):
    policy, fleet = holding((larger, 800), (0, 1))
    assert policy.pick(fleet, chat("0" * 12)) is fleet[chosen]


def test_a_preview_says_that_the_queue_decided_between_small_trees():
    policy, fleet = holding((900, 800), (0, 1))
    words = "a small tree with the shortest queue is taken: 900 bytes"
    assert words in policy.preview(fleet, chat("0" * 12))[1]


def test_of_small_trees_with_equal_queues_the_smallest_is_taken():
    policy, fleet = holding((810, 800, 805), (1, 1, 1))
    assert policy.pick(fleet, chat("0" * 12)) is fleet[1]


sizes_and_loads = st.lists(
    st.tuples(st.sampled_from((0, 300, 450, 600, 700, 719, 720, 900, 2000)), st.integers(0, 3)),
    min_size=1, max_size=6,
)  # fmt: skip


@given(sizes_and_loads, st.integers(1, 400))
def test_the_least_full_of_the_small_trees_is_taken_and_of_those_the_smallest(of, length):
    policy, fleet = holding(*zip(*of, strict=True))
    bound = min(size for size, _ in of) * 1.5 + length
    ranks = [(load, size) if size <= bound else (9, 0) for size, load in of]
    assert ranks[fleet.index(policy.pick(fleet, chat("0" * length)))] == min(ranks)


def test_hardly_a_miss_waits_at_one_worker_while_another_is_idle():
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


def test_a_miss_goes_to_the_least_loaded_where_that_is_asked_for():
    policy, fleet = cache_aware(fallback="least_loaded"), workers(4, 3, 5)
    assert [policy.pick(fleet, chat(text)) for text in unrelated(3)] == [fleet[1]] * 3


@pytest.mark.parametrize(
    ("loads", "even"),
    [((32, 0), True), ((33, 0), False), ((1033, 1000), False), ((1032, 1000), True)],
)
def test_the_absolute_gap_must_be_exceeded(loads, even):
    policy, fleet = cache_aware(), workers(*loads)
    policy.pick(fleet[:1], chat(LONG))
    assert (policy.pick(fleet, chat(LONG)) is fleet[0]) is even


@pytest.mark.parametrize(("loads", "even"), [((150, 100), True), ((151, 100), False)])
def test_so_must_the_ratio(loads, even):
    policy, fleet = cache_aware(balance_rel_threshold=1.5), workers(*loads)
    policy.pick(fleet[:1], chat(LONG))
    assert (policy.pick(fleet, chat(LONG)) is fleet[0]) is even


def test_a_request_that_load_sent_elsewhere_is_known_there_from_then_on():
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


def test_of_all_holders_the_least_loaded_gets_it():
    policy, fleet = held_by_two()
    assert [policy.pick(fleet, chat(LONG)) for _ in range(3)] == [fleet[1]] * 3
    fleet[1].in_flight = 3
    assert {policy.pick(fleet, chat(LONG)) for _ in range(2)} == set(fleet[:2])


def test_of_the_longest_each_gets_its_turn_whatever_its_load():
    policy, fleet = held_by_two(holders="longest")
    assert {policy.pick(fleet, chat(LONG)) for _ in range(2)} == set(fleet[:2])


@pytest.mark.parametrize("holders", ["all", "longest"])
def test_a_longer_match_beats_a_lower_load(holders):
    policy, fleet = cache_aware(holders=holders), workers(9, 0)
    for number, worker in enumerate(fleet):
        policy.pick([worker], chat(LONG + "!" * (10 - number)))
    assert policy.pick(fleet, chat(LONG + "!" * 10)) is fleet[0]


def test_a_global_spill_moves_requests_of_workers_that_are_not_hot():
    policy, fleet = cache_aware(spill="global"), workers(1, 99, 0)
    policy.pick(fleet[:1], chat(LONG))
    assert policy.pick(fleet, chat(LONG)) is fleet[2]


def test_a_spill_of_the_chosen_leaves_those_alone():
    policy, fleet = cache_aware(spill="chosen"), workers(1, 99, 0)
    policy.pick(fleet[:1], chat(LONG))
    policy.pick(fleet[1:2], chat("x" * 99))
    assert policy.pick(fleet, chat(LONG)) is fleet[0]
    assert policy.pick(fleet, chat("x" * 99)) is fleet[2]
    assert branch_of(policy) == {"smallest_tree": 2, "matched": 1, "spilled": 1}


@pytest.mark.parametrize(("load", "stays"), [(48, True), (49, False)])
def test_the_chosen_spills_above_the_mean_and_the_gap(load, stays):
    # (48 + 16) / 4 = 16, and 48 is no more than 16 + 32; 49 is more than 16.25 + 32.
    policy = cache_aware(spill="chosen", balance_rel_threshold=2.0)
    fleet = workers(load, 16, 0, 0)
    policy.pick(fleet[:1], chat(LONG))
    assert (policy.pick(fleet, chat(LONG)) is fleet[0]) is stays


def test_a_holder_that_may_not_take_it_is_passed_over_for_the_next_best():
    policy, fleet = cache_aware(), workers(0, 0, 0)
    policy.pick(fleet[:1], chat(LONG * 2))
    policy.pick(fleet[1:2], chat(LONG * 2 + "?"))
    policy.pick(fleet[1:2], chat(LONG + "!"))
    assert policy.pick(fleet[1:], chat(LONG * 2)) is fleet[1]
    assert policy.pick(fleet[2:], chat(LONG * 2)) is fleet[2]


def test_models_have_trees_of_their_own_where_workers_name_them():
    policy = cache_aware()
    one, other = workers(0, 0, model="m"), workers(0, 0, model="n")
    home = policy.pick(one, chat(LONG, "m"))
    assert policy.pick(one, chat(LONG, "m")) is home
    policy.pick(other, chat(LONG, "n"))
    assert branch_of(policy) == {"smallest_tree": 2, "matched": 1}


def test_models_that_only_clients_name_make_no_trees():
    policy, fleet = cache_aware(), workers(0, 0)
    homes = {policy.pick(fleet, chat(LONG, f"model {number}")) for number in range(50)}
    assert len(homes) == 1
    assert policy.facts()["tree_size"] < len(LONG) + 8


def test_a_request_without_text_goes_to_the_shortest_queue_and_leaves_nothing():
    policy, fleet = cache_aware(), workers(2, 1, 1)
    picked = Counter(policy.pick(fleet, need).url for need in [NEED, Need(0, body=Payload())] * 4)
    assert picked == {fleet[1].url: 4, fleet[2].url: 4}
    assert (branch_of(policy), policy.facts()["tree_size"]) == ({"no_text": 8}, 0)


def settled(share, others=3):
    policy = cache_aware(warmup_share=share)
    fleet = workers(*[0] * (others + 1))
    for text in unrelated(30 * others, seed=2):
        policy.pick(fleet[:others], chat(text))
    return policy, fleet


def taken_by_the_new(policy, fleet, requests):
    texts = unrelated(requests, seed=3)
    return sum(policy.pick(fleet, chat(text)) is fleet[-1] for text in texts)


def test_a_new_worker_gets_no_more_than_its_share_of_the_misses_while_it_warms_up():
    assert taken_by_the_new(*settled(0.5), 20) == 10
    assert taken_by_the_new(*settled(0.34), 21) == 7


def test_the_share_is_never_below_a_fair_one():
    assert taken_by_the_new(*settled(0.01), 20) == 5


def test_without_a_share_the_smallest_tree_alone_decides():
    assert taken_by_the_new(*settled(0.0), 20) == 20


def test_a_worker_that_has_grown_is_like_the_others():
    policy, fleet = settled(0.5)
    taken_by_the_new(policy, fleet, 400)
    sizes = policy.facts()["tree_size_by_worker"].values()
    assert max(sizes) - min(sizes) <= 400


def test_what_a_forgotten_worker_held_matches_nobody():
    policy, fleet = cache_aware(), workers(0, 0)
    policy.pick(fleet[:1], chat(LONG))
    policy.forget(fleet[0])
    policy.pick(fleet[:1], chat("a short one"))
    assert policy.pick(fleet, chat(LONG)) is fleet[1]
    assert branch_of(policy) == {"smallest_tree": 3}


def test_a_worker_that_was_flushed_may_begin_at_once():
    policy, fleet = settled(0.34)
    assert policy.pick(fleet, chat("something")) is fleet[-1]
    assert policy.preview(fleet, chat("another"))[0] is not fleet[-1]
    assert "warms up" in policy.preview(fleet, chat("another"))[1]
    policy.forget(fleet[-1])
    assert policy.pick(fleet, chat("another")) is fleet[-1]


def test_weight_counts_in_loads_and_sizes():
    policy, fleet = cache_aware(fallback="least_loaded"), weighing(1, 3)
    fleet[0].in_flight, fleet[1].in_flight = 2, 4
    assert policy.pick(fleet, chat("anything")) is fleet[1]
    policy, fleet = cache_aware(warmup_share=0.0), weighing(1, 3)
    picked = Counter(policy.pick(fleet, chat(text)).url for text in unrelated(40))
    assert 8 <= picked[fleet[0].url] <= 12


def test_loads_that_fit_the_weights_are_no_imbalance():
    policy, fleet = cache_aware(), weighing(1, 9)
    policy.pick(fleet[:1], chat(LONG))
    fleet[0].in_flight, fleet[1].in_flight = 10, 90
    assert policy.pick(fleet, chat(LONG)) is fleet[0]


texts = st.sampled_from(["a" * 50, "a" * 30 + "b" * 20, LONG, LONG + "x", "b", ""])


@given(st.lists(st.tuples(texts, st.integers(0, 2)), max_size=25), st.sampled_from(FALLBACKS))
def test_a_preview_says_what_the_pick_then_does_and_changes_nothing(run, fallback):
    policy, fleet = cache_aware(balance_abs_threshold=1, fallback=fallback), workers(0, 0, 0)
    for text, busy in run:
        before = policy.facts()
        previews = {policy.preview(fleet, chat(text))[0] for _ in range(2)}
        policy.details(fleet, chat(text))
        assert policy.facts() == before
        assert previews == {policy.pick(fleet, chat(text))}
        fleet[busy].in_flight = (fleet[busy].in_flight + 1) % 4


@given(st.lists(st.tuples(texts, st.integers(0, 3)), max_size=25), st.sampled_from(FALLBACKS))
def test_a_preview_of_a_large_fleet_is_the_next_pick_too(run, fallback):
    policy, fleet = cache_aware(balance_abs_threshold=1, fallback=fallback), workers(*[0] * 130)
    for text, busy in run:
        previews = {policy.preview(fleet, chat(text))[0] for _ in range(3)}
        assert previews == {policy.pick(fleet, chat(text))}
        fleet[0].in_flight = busy


def test_a_preview_makes_no_pick_of_a_large_fleet_go_by_an_older_verdict():
    policy, fleet = cache_aware(balance_abs_threshold=1), workers(*[0] * 130)
    policy.took(fleet[5], chat(LONG))
    fleet[5].in_flight = 9
    assert policy.preview(fleet, chat(LONG))[1].startswith("loads differ")
    fleet[5].in_flight = 0
    assert policy.pick(fleet, chat(LONG)) is fleet[5]


def test_a_preview_gives_the_reason_in_words():
    policy, fleet = cache_aware(balance_abs_threshold=4), workers(0, 0)
    assert "the smallest tree is taken: 0 bytes" in policy.preview(fleet, chat("x" * 30))[1]
    policy.pick(fleet[:1], chat("x" * 30))
    assert policy.preview(fleet, chat("x" * 30))[1] == "30 of 30 bytes match, held by w0:1"
    assert policy.details(fleet, chat("x" * 20)) == {
        "text_bytes": 20,
        "matched_bytes": {fleet[0].url: 20, fleet[1].url: 0},
    }
    fleet[0].in_flight = 9
    assert policy.preview(fleet, chat("x" * 30))[1].startswith("loads differ")
    assert policy.preview(fleet, NEED)[1].startswith("the request has no text")


def test_new_parameters_leave_the_tree_alone():
    policy, fleet = cache_aware(), workers(0, 0)
    home = policy.pick(fleet, chat(LONG))
    rules = CacheAware(balance_abs_threshold=1, cache_threshold=0.9)
    assert policy.tune(Routing(policy="cache_aware", cache_aware=rules))
    assert policy.preview(fleet, chat(LONG))[0] is home
    assert policy.preview(fleet, chat(LONG * 2))[1].startswith("only ")
    home.in_flight = 2
    assert policy.pick(fleet, chat(LONG)) is not home
    assert not policy.tune(Routing(policy="round_robin"))


def test_new_thresholds_hold_for_the_next_pick_of_a_large_fleet_too():
    policy, fleet = cache_aware(), workers(*[0] * 130)
    home = policy.pick(fleet, chat(LONG))
    home.in_flight = 9
    assert policy.pick(fleet, chat(LONG)) is home
    rules = CacheAware(balance_abs_threshold=1)
    assert policy.tune(Routing(policy="cache_aware", cache_aware=rules))
    assert policy.pick(fleet, chat(LONG)) is not home


def test_a_smaller_tree_is_cut_back_without_waiting_for_the_interval():
    policy, fleet = cache_aware(), workers(0, 0)
    for text in unrelated(50):
        policy.pick(fleet, chat(text))
    policy.tune(Routing(policy="cache_aware", cache_aware=CacheAware(max_tree_size=1000)))
    policy.tend(1.0)
    assert 0 < policy.facts()["tree_size"] <= 1000


def test_the_tree_is_cut_back_once_per_interval():
    policy, fleet = cache_aware(max_tree_size=1000, eviction_interval_secs=10), workers(0)
    for text in unrelated(5, length=210):
        policy.pick(fleet, chat(text))
    policy.tend(9.9)
    assert policy.facts()["tree_size"] > 1000
    policy.tend(10.1)
    assert policy.facts()["tree_size"] <= 1000


def test_a_shorter_interval_does_not_wait_for_the_end_of_the_longer_one():
    policy, fleet = cache_aware(max_tree_size=1000, eviction_interval_secs=1e6), workers(0)
    for text in unrelated(5, length=210):
        policy.pick(fleet, chat(text))
    policy.tend(0.1)
    rules = CacheAware(max_tree_size=1100, eviction_interval_secs=5)
    policy.tune(Routing(policy="cache_aware", cache_aware=rules))
    policy.pick(fleet, chat("z" * 70))
    assert policy.facts()["tree_size"] > 1100
    policy.tend(5.2)
    assert policy.facts()["tree_size"] <= 1100


def test_an_hour_of_tails_below_one_prompt_stays_bounded_and_keeps_the_prompt():
    policy, fleet = cache_aware(max_tree_size=100_000), workers(0, 0)
    chance = random.Random(5)
    home = policy.pick(fleet, chat(LONG))
    for quarter in range(4 * 3600):
        policy.tend(quarter / 4)
        if quarter % 4 == 0:
            tail = "".join(chance.choices("etaoin ", k=150))
            assert policy.pick(fleet, chat(LONG + tail)) is home
            policy.pick(fleet, chat(tail))
            assert policy.facts()["tree_size"] <= 125_000
    assert policy.facts()["picks"]["matched"] >= 3600
    while policy.facts()["tree_size"] > 100_000:
        policy.tend(3661.0)


def test_a_policy_made_anew_has_no_memory():
    fleet = workers(0, 0)
    policy = build(Routing(policy="cache_aware"), first, 0.0)
    assert policy.facts()["matched_ratio"] is None
    policy.took(fleet[1], chat(LONG))
    assert policy.pick(fleet, chat(LONG)) is fleet[1]
    assert policy.facts()["matched_ratio"] == 1.0
