import random
from collections import Counter
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.policies.least_request import CandidateWeights, least
from tests.fleet.entries import entry, fleet_of
from tests.routing.policies.chats import NEED, build, weighted, workers

weights = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(weights, st.integers(1, 3))
def test_round_robin_picks_each_worker_by_its_weight_in_every_round(worker_weights, rounds):
    policy, fleet = build("round_robin"), weighted(*worker_weights)
    if len(set(worker_weights)) == 1:
        worker_weights = [1] * len(worker_weights)
    picked = [policy.pick(fleet, NEED) for _ in range(sum(worker_weights) * rounds)]
    assert [picked.count(worker) for worker in fleet] == [
        weight * rounds for weight in worker_weights
    ]


def test_a_heavy_worker_is_not_picked_in_bursts():
    policy, fleet = build("round_robin"), weighted(3, 1, 2)
    picked = "".join(str(fleet.index(policy.pick(fleet, NEED))) for _ in range(6))
    assert "00" not in picked[1:]
    assert sorted(picked) == list("000122")


def test_weighted_round_robin_continues_while_candidates_change():
    policy, fleet = build("round_robin"), weighted(1, 2, 3)
    for _ in range(60):
        for out in fleet:
            assert policy.pick([worker for worker in fleet if worker is not out], NEED) is not out
    policy.forget_worker(fleet[0])
    assert policy.pick(fleet, NEED) in fleet


def test_a_changed_weight_takes_effect():
    fleet, policy = fleet_of(entry("a"), entry("b")), build("round_robin")
    assert len({policy.pick(fleet.candidates(None, 0), NEED) for _ in range(2)}) == 2
    fleet.apply([entry("a", weight=3), entry("b")], fleet.workers[0].registered_at)
    picked = Counter(policy.pick(fleet.candidates(None, 0), NEED).display_id for _ in range(8))
    assert picked == {"a:1": 6, "b:1": 2}


def test_least_request_divides_loads_by_weights():
    policy, fleet = build("least_request"), weighted(1, 4)
    for _ in range(50):
        policy.pick(fleet, NEED).in_flight += 1
    assert [worker.in_flight for worker in fleet] == [10, 40]


def test_power_of_two_divides_loads_by_weights():
    policy, fleet = build("power_of_two", random.Random(1).randrange), weighted(1, 4)
    for _ in range(50):
        policy.pick(fleet, NEED).in_flight += 1
    assert [worker.in_flight for worker in fleet] == [10, 40]


@given(weights)
def test_random_draws_by_weight(worker_weights):
    fleet, draws = weighted(*worker_weights), cycle(range(sum(worker_weights)))
    policy = build("random", lambda count: next(draws) % count)
    picked = Counter(policy.pick(fleet, NEED).url for _ in range(sum(worker_weights) * 5))
    equal = len(set(worker_weights)) == 1
    shares = [1 if equal else weight for weight in worker_weights]
    total = sum(worker_weights) * 5 / sum(shares)
    assert [picked[worker.url] for worker in fleet] == [share * total for share in shares]


def test_ties_are_picked_in_turn():
    fleet = workers(1, 0, 0)
    assert [least(fleet, turn)[0] for turn in range(4)] == [fleet[1], fleet[2]] * 2
    assert least(fleet, 7)[1] == 2


def test_a_candidate_list_is_examined_once():
    known, fleet = CandidateWeights(), weighted(1, 3)
    assert not known.take(fleet)
    fleet[1].weight = 1
    assert not known.take(fleet)
    assert known.take(list(fleet))
    assert (known.total, known.mean) == (2, 1.0)


@pytest.mark.parametrize("name", ["round_robin", "least_request"])
@pytest.mark.parametrize("worker_weights", [(1, 1, 1), (1, 2, 5)])
def test_a_preview_is_the_next_pick_and_does_not_advance_the_rotation(name, worker_weights):
    policy, fleet = build(name), weighted(*worker_weights)
    for _ in range(9):
        chosen, reason = policy.preview_pick(fleet, NEED)
        assert reason
        assert policy.preview_pick(fleet, NEED)[0] is chosen
        assert policy.pick(fleet, NEED) is chosen


@pytest.mark.parametrize("name", ["random", "power_of_two"])
def test_a_preview_of_a_random_pick_is_marked_random(name):
    policy, fleet = build(name, random.Random(2).randrange), weighted(1, 2)
    chosen, reason = policy.preview_pick(fleet, NEED)
    assert chosen in fleet
    assert "at random" in reason
