import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.fields import POLICIES
from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing import policies
from omni_proxy.routing.inspect.requirements import Requirements
from tests.fleet.entries import NOW, entry

NEED = Requirements(0)


def build(name, below, **more):
    return policies.build_policy(RoutingConfig(policy=name, **more), below, 0.0)


NAMES = ("round_robin", "random", "least_request", "power_of_two")
loads = st.lists(st.integers(0, 4), min_size=1, max_size=6)
runs = st.lists(loads, max_size=30)


def loaded(*in_flight: int) -> list[Worker]:
    workers = [Worker(entry(f"w{number}"), NOW) for number in range(len(in_flight))]
    for worker, count in zip(workers, in_flight, strict=True):
        worker.in_flight = count
    return workers


@given(runs)
def test_round_robin_is_a_counter_modulo_the_number_of_candidates(run):
    policy = build("round_robin", random.randrange)
    for turn, counts in enumerate(run):
        candidates = loaded(*counts)
        assert policy.pick(candidates, NEED) is candidates[turn % len(candidates)]


@given(runs)
def test_least_request_picks_a_least_loaded_worker(run):
    policy = build("least_request", random.randrange)
    for counts in run:
        assert policy.pick(loaded(*counts), NEED).in_flight == min(counts)


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 4))
def test_least_request_picks_equally_loaded_workers_in_turn(count, load, rounds):
    policy = build("least_request", random.randrange)
    candidates = loaded(*[load] * count)
    picked = Counter(policy.pick(candidates, NEED).url for _ in range(count * rounds))
    assert set(picked.values()) == {rounds}
    assert len(picked) == count


@given(loads, st.integers(0, 9), st.integers(1, 5))
def test_least_request_picks_each_of_the_least_loaded_once_in_every_round(counts, before, rounds):
    """The order is that of the candidates, from any starting point."""
    policy = build("least_request", random.randrange)
    idle = loaded(*[0] * len(counts))
    for _ in range(before):  # the rotation may start anywhere
        policy.pick(idle, NEED)
    candidates = loaded(*counts)
    ties = [worker for worker in candidates if worker.in_flight == min(counts)]
    picked = []
    for _ in range(rounds * len(ties)):
        previewed, _ = policy.preview_pick(candidates, NEED)
        picked.append(policy.pick(candidates, NEED))
        assert picked[-1] is previewed
    first = ties.index(picked[0])
    assert picked == [ties[(first + at) % len(ties)] for at in range(len(picked))]


@given(st.integers(2, 6), st.integers(1, 40))
def test_least_request_spreads_requests_that_stay_in_flight(count, requests):
    policy = build("least_request", random.randrange)
    candidates = loaded(*[0] * count)
    for _ in range(requests):
        policy.pick(candidates, NEED).in_flight += 1
    in_flight = [worker.in_flight for worker in candidates]
    assert max(in_flight) - min(in_flight) <= 1


@given(loads, st.randoms())
def test_random_picks_the_drawn_candidate(counts, chance):
    candidates = loaded(*counts)
    drawn = []

    def below(count):
        drawn.append(chance.randrange(count))
        return drawn[-1]

    assert build("random", below).pick(candidates, NEED) is candidates[drawn[-1]]


@given(loads, st.randoms())
def test_power_of_two_picks_the_less_loaded_of_two_drawn_workers(counts, chance):
    candidates = loaded(*counts)
    limits = []

    def below(count):
        limits.append(count)
        return chance.randrange(count)

    chosen = build("power_of_two", below).pick(candidates, NEED)
    assert limits == ([1] if len(counts) == 1 else [len(counts), len(counts) - 1])
    if len(counts) == 2:
        assert chosen.in_flight == min(counts)
    elif counts.count(max(counts)) == 1 and len(counts) > 1:
        assert chosen.in_flight < max(counts)


def test_power_of_two_can_draw_every_pair():
    draws = [(first, second) for first in range(3) for second in range(2)]
    pairs = set()
    for first, second in draws:
        pending = [first, second]
        candidates = loaded(0, 0, 0)
        chosen = build("power_of_two", lambda _: pending.pop(0)).pick(candidates, NEED)  # noqa: B023
        pairs.add((candidates.index(chosen), second + (second >= first)))
    assert pairs == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}


@pytest.mark.parametrize("name", NAMES)
@given(counts=loads)
def test_no_policy_changes_its_candidates(name, counts):
    candidates = loaded(*counts)
    before = list(candidates)
    assert build(name, random.Random(0).randrange).pick(candidates, NEED) in before
    assert candidates == before


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_has_its_name(name):
    assert build(name, random.randrange).name == name


def test_the_built_in_policies_are_those_of_the_configuration():
    assert tuple(policies.BUILT_IN) == POLICIES
    for name in POLICIES:
        assert build(name, random.randrange).name == name
