import random
from collections import Counter
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.policies.least_request import CandidateWeights, least
from tests.fleet.entries import entry, fleet_of
from tests.routing.policies.chats import NEED, build, weighing, workers

weights = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(weights, st.integers(1, 3))
def test_smooth_turns_give_each_its_weight_in_every_round(of_each, rounds):
    policy, fleet = build("round_robin"), weighing(*of_each)
    if len(set(of_each)) == 1:
        of_each = [1] * len(of_each)
    picked = [policy.pick(fleet, NEED) for _ in range(sum(of_each) * rounds)]
    assert [picked.count(worker) for worker in fleet] == [one * rounds for one in of_each]


def test_a_heavy_worker_is_not_picked_in_bursts():
    policy, fleet = build("round_robin"), weighing(3, 1, 2)
    picked = "".join(str(fleet.index(policy.pick(fleet, NEED))) for _ in range(6))
    assert "00" not in picked[1:]
    assert sorted(picked) == list("000122")


def test_turns_by_weight_go_on_while_candidates_change():
    policy, fleet = build("round_robin"), weighing(1, 2, 3)
    for _ in range(60):
        for out in fleet:
            assert policy.pick([w for w in fleet if w is not out], NEED) is not out
    policy.forget_worker(fleet[0])
    assert policy.pick(fleet, NEED) in fleet


def test_a_change_of_weight_is_taken_up():
    fleet, policy = fleet_of(entry("a"), entry("b")), build("round_robin")
    assert len({policy.pick(fleet.candidates(None, 0), NEED) for _ in range(2)}) == 2
    fleet.apply([entry("a", weight=3), entry("b")], fleet.workers[0].registered_at)
    picked = Counter(policy.pick(fleet.candidates(None, 0), NEED).display_id for _ in range(8))
    assert picked == {"a:1": 6, "b:1": 2}


def test_least_request_counts_per_unit_of_weight():
    policy, fleet = build("least_request"), weighing(1, 4)
    for _ in range(50):
        policy.pick(fleet, NEED).in_flight += 1
    assert [worker.in_flight for worker in fleet] == [10, 40]


def test_power_of_two_counts_per_unit_of_weight():
    policy, fleet = build("power_of_two", random.Random(1).randrange), weighing(1, 4)
    for _ in range(50):
        policy.pick(fleet, NEED).in_flight += 1
    assert [worker.in_flight for worker in fleet] == [10, 40]


@given(weights)
def test_random_draws_by_weight(of_each):
    fleet, every = weighing(*of_each), cycle(range(sum(of_each)))
    policy = build("random", lambda count: next(every) % count)
    picked = Counter(policy.pick(fleet, NEED).url for _ in range(sum(of_each) * 5))
    even = len(set(of_each)) == 1
    shares = [1 if even else weight for weight in of_each]
    total = sum(of_each) * 5 / sum(shares)
    assert [picked[worker.url] for worker in fleet] == [share * total for share in shares]


def test_ties_take_turns_among_themselves_alone():
    fleet = workers(1, 0, 0)
    assert [least(fleet, turn)[0] for turn in range(4)] == [fleet[1], fleet[2]] * 2
    assert least(fleet, 7)[1] == 2


def test_a_list_is_looked_at_once():
    known, fleet = CandidateWeights(), weighing(1, 3)
    assert not known.take(fleet)
    fleet[1].weight = 1
    assert not known.take(fleet)
    assert known.take(list(fleet))
    assert (known.total, known.mean) == (2, 1.0)


@pytest.mark.parametrize("name", ["round_robin", "least_request"])
@pytest.mark.parametrize("of_each", [(1, 1, 1), (1, 2, 5)])
def test_a_preview_is_the_next_pick_and_spends_no_turn(name, of_each):
    policy, fleet = build(name), weighing(*of_each)
    for _ in range(9):
        chosen, why = policy.preview_pick(fleet, NEED)
        assert why
        assert policy.preview_pick(fleet, NEED)[0] is chosen
        assert policy.pick(fleet, NEED) is chosen


@pytest.mark.parametrize("name", ["random", "power_of_two"])
def test_a_preview_of_a_random_pick_is_marked_random(name):
    policy, fleet = build(name, random.Random(2).randrange), weighing(1, 2)
    chosen, why = policy.preview_pick(fleet, NEED)
    assert chosen in fleet
    assert "at random" in why
