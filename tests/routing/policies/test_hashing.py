import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.config.schema import PrefixHashConfig, RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.hashing import PLACES, RINGS, Rings
from tests.example_counts import examples
from tests.fleet.entries import NOW, entry
from tests.routing.policies.chats import NEED, build, chat, weighted, workers

KEYS = [f"user-{number}" for number in range(2000)]


def owners(fleet, policy=None):
    policy = policy or build("consistent_hashing")
    return {key: policy.pick(fleet, Requirements(0, affinity_key=key)).url for key in KEYS}


def test_a_key_stays_with_its_worker_in_every_process_and_order():
    fleet = workers(0, 5, 9)
    again = workers(7, 0, 0)
    assert owners(fleet) == owners(again[::-1])


def test_a_worker_has_150_points_on_the_ring_as_in_other_routers():
    rings = Rings()
    rings.walk(workers(0, 0, 0), b"k")
    assert rings.points == 3 * 150


def test_keys_are_spread_roughly_evenly():
    counts = Counter(owners(workers(0, 0, 0, 0)).values())
    assert all(350 <= count <= 650 for count in counts.values())


@settings(max_examples=examples(15))
@given(st.integers(2, 12), st.integers(0, 11))
def test_an_added_worker_takes_its_share_and_no_other_key_moves(count, place):
    fleet = workers(*[0] * count)
    new = fleet.pop(place % count)
    before, after = owners(fleet), owners([*fleet, new])
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} <= {new.url}
    assert len(moved) <= 1.6 * len(KEYS) / count


def test_keys_of_an_absent_worker_go_to_the_next_ones_and_return():
    policy, fleet = build("consistent_hashing"), workers(0, 0, 0, 0)
    before = owners(fleet, policy)
    for out in fleet:
        remaining = [worker for worker in fleet if worker is not out]
        during = owners(remaining, policy)
        assert during == owners(remaining)
        assert all(during[key] == url for key, url in before.items() if url != out.url)
        inherited = Counter(during[key] for key, url in before.items() if url == out.url)
        assert len(inherited) == 3
    assert owners(fleet, policy) == before


def test_the_share_of_keys_grows_with_the_weight():
    counts = Counter(owners(weighted(1, 3)).values())
    assert 2.2 <= counts["http://w1:1"] / counts["http://w0:1"] <= 4


@pytest.mark.parametrize("weight", [50, 1000, 1_000_000])
def test_the_ring_is_bounded_for_huge_weights_which_still_count(weight):
    fleet = weighted(weight, weight, 3 * weight)
    rings = Rings()
    for candidates in fleet, list(fleet):
        rings.walk(candidates, b"k")
        assert len(rings) == 1
        assert rings.points <= 1 << 15
    counts = Counter(owners(fleet).values())
    assert 0.5 <= counts["http://w2:1"] / len(KEYS) <= 0.7


def test_a_changed_weight_is_noticed():
    policy, fleet = build("consistent_hashing"), weighted(1, 1)
    owners(fleet, policy)
    fleet[0].configure(entry("w0", weight=9))
    assert Counter(owners(list(fleet), policy).values())["http://w0:1"] > 0.8 * len(KEYS)


def test_requests_without_a_key_go_to_the_least_loaded_in_turn():
    policy, fleet = build("consistent_hashing"), workers(1, 0, 0)
    assert {policy.pick(fleet, NEED) for _ in range(4)} == set(fleet[1:])
    assert policy.needs_affinity_key


def test_any_key_has_a_worker():
    policy, fleet = build("consistent_hashing"), workers(0, 0)
    for key in ("\udc80", "é" * 256, "\x00"):
        assert policy.pick(fleet, Requirements(0, affinity_key=key)) in fleet


def test_the_number_of_rings_is_bounded_and_they_end_with_their_workers():
    policy = build("consistent_hashing")
    for number in range(RINGS * 2):
        fleet = [Worker(entry(f"x{number}"), NOW), Worker(entry("same"), NOW)]
        policy.pick(fleet, Requirements(0, affinity_key="k"))
    assert policy.stats() == {"rings": RINGS}
    policy.forget_worker(fleet[0])
    assert policy.stats() == {"rings": RINGS - 1}


def test_for_a_subset_of_workers_the_existing_ring_is_walked():
    rings, fleet = Rings(), workers(*[0] * 8)
    list(rings.walk(fleet, b"k"))
    for key in map(str.encode, KEYS[:200]):
        subset = random.Random(key).sample(fleet, 5)
        assert list(rings.walk(subset, key)) == list(Rings().walk(subset, key))
    assert (len(rings), rings.points) == (1, 8 * PLACES)


def test_for_a_subset_with_other_relative_weights_a_ring_is_built():
    rings, fleet = Rings(), weighted(200, 100, 100, 1)
    list(rings.walk(fleet, b"k"))
    for key in map(str.encode, KEYS[:20]):
        assert list(rings.walk(fleet[2:], key)) == list(Rings().walk(fleet[2:], key))
    assert len(rings) == 2


def test_the_new_request_counts_in_the_load_bound():
    policy, fleet = build("prefix_hash"), workers(0, 0)
    home = policy.pick(fleet, chat("x"))
    home.in_flight = 1  # the bound is (1 + 1) / 2 * 1.25
    assert policy.pick(fleet, chat("x")) is home


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), min_size=1, max_size=6),
    st.text(min_size=1, max_size=20),
    st.sampled_from([1.0, 1.25, 3.0]),
)
def test_no_worker_above_its_load_bound_is_picked(loads, text, factor):
    fleet = weighted(*[weight for _, weight in loads])
    for worker, (load, _) in zip(fleet, loads, strict=True):
        worker.in_flight = load
    policy = build("prefix_hash", prefix_hash=PrefixHashConfig(load_factor=factor))
    chosen = policy.pick(fleet, chat(text))
    share = chosen.weight / sum(worker.weight for worker in fleet)
    total = sum(worker.in_flight for worker in fleet) + 1
    assert chosen.in_flight <= total * share * factor + 1e-9
    again = build("prefix_hash", prefix_hash=PrefixHashConfig(load_factor=factor))
    assert again.pick(fleet[::-1], chat(text)) is chosen


def test_a_prefix_stays_with_its_worker_until_the_load_bound_is_exceeded():
    policy, fleet = build("prefix_hash"), workers(0, 0, 0, 0)
    home = policy.pick(fleet, chat("x" * 2000))
    assert policy.pick(fleet, chat("x" * 1024 + "y")) is home
    for worker in fleet:
        worker.in_flight = 3
    home.in_flight = 4  # the bound is (13 + 1) / 4 * 1.25 = 4.375
    assert policy.pick(fleet, chat("x" * 2000)) is home
    home.in_flight = 5  # the bound is (14 + 1) / 4 * 1.25 = 4.6875
    other, reason = policy.preview_pick(fleet, chat("x" * 2000))
    assert other is not home
    assert home.display_id in reason
    assert policy.pick(fleet, chat("x" * 2000)) is other
    assert policy.stats() == {"rings": 1, "passed_over": 1}


def test_the_prefix_length_is_configurable():
    policy, fleet = build("prefix_hash"), workers(*[0] * 8)
    requests = [chat("same" + "abcdefgh"[number] * 50) for number in range(8)]
    assert len({policy.pick(fleet, need) for need in requests}) > 1
    policy.reconfigure(
        RoutingConfig(policy="prefix_hash", prefix_hash=PrefixHashConfig(prefix_length=5))
    )
    assert len({policy.pick(fleet, need) for need in requests}) == 1


def test_requests_without_text_go_to_workers_in_turn():
    policy, fleet = build("prefix_hash"), workers(0, 0, 0)
    assert {policy.pick(fleet, NEED) for _ in range(3)} == set(fleet)


@pytest.mark.parametrize("name", ["consistent_hashing", "prefix_hash"])
def test_previews_agree_with_picks(name):
    policy, fleet = build(name), workers(3, 0, 1)
    for need in (NEED, chat("hello there", key="me"), chat("x", key="you")):
        chosen, reason = policy.preview_pick(fleet, need)
        assert reason
        assert policy.preview_pick(fleet, need)[0] is chosen
        assert policy.pick(fleet, need) is chosen


def test_a_pick_succeeds_while_smoothed_loads_are_negative():
    """Processes get the counts of a cluster a moment after their smoothing."""
    policy, fleet = build("prefix_hash"), workers(*[0] * 4)
    for worker, offset in zip(fleet, (-60.0, -59.0, -61.0, -60.0), strict=True):
        worker.load_offset = offset
    assert policy.pick(fleet, chat("a" * 400)) is fleet[2]
