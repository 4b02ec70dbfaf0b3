"""The fleets of several doors on one board, in one process: what they see of each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from omni_proxy.fleet.capabilities import ALL_CAPABILITIES
from omni_proxy.fleet.worker_state import worker_state
from omni_proxy.multiprocess.messages import (
    HalfOpenEndedEvent,
    HalfOpenStartedEvent,
    RequestFailedEvent,
    RequestSucceededEvent,
)
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet
from omni_proxy.multiprocess.shared_counters import SharedCounters
from omni_proxy.routing.pick import has_room
from tests.fleet.entries import NOW, entry, fleet_of

PROCESSES = 3
NAMES = ("a", "b", "c")


class Door:
    def __init__(self, counters: SharedCounters, index: int) -> None:
        self.now = 0.0
        self.told: list = []
        self.fleet = ReplicatedFleet(counters, index, lambda: self.now, self.told.append)

    def sees(self) -> dict[str, int]:
        self.now += 1
        self.fleet.candidates(None, 0)
        return {worker.url: worker.in_flight for worker in self.fleet.workers}


def rows(fleet, **changes):
    return [
        structs.replace(worker_state(worker, serial, serial), **changes)
        for serial, worker in enumerate(fleet.workers, start=1)
    ]


@pytest.fixture(scope="module")
def counters():
    return SharedCounters.create()


def doors_on(counters, fleet):
    made = [Door(counters, index) for index in range(1, PROCESSES + 1)]
    for index, door in enumerate(made, start=1):
        counters.clear(index, 10)
        door.fleet.reach(PROCESSES)
        door.fleet.follow(rows(fleet), NOW)
    return made


steps = st.lists(
    st.tuples(
        st.integers(0, PROCESSES - 1),
        st.sampled_from(NAMES),
        st.sampled_from(["take", "leave", "die"]),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_every_door_sees_the_sum_of_what_all_have(counters, steps):
    control = fleet_of(*map(entry, NAMES))
    processes = doors_on(counters, control)
    have = {(index, name): 0 for index in range(PROCESSES) for name in NAMES}
    for index, name, what in steps:
        worker = processes[index].fleet.find(f"http://{name}:1")
        if what == "take":
            worker.in_flight += 1
            have[index, name] += 1
        elif what == "leave" and have[index, name]:
            worker.in_flight -= 1
            have[index, name] -= 1
        elif what == "die":
            counters.clear(index + 1, 10)
            have |= {(index, each): 0 for each in NAMES}
            processes[index] = Door(counters, index + 1)
            processes[index].fleet.reach(PROCESSES)
            processes[index].fleet.follow(rows(control), NOW)
        wanted = {f"http://{n}:1": sum(have[i, n] for i in range(PROCESSES)) for n in NAMES}
        assert [door.sees() for door in processes] == [wanted] * PROCESSES


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, PROCESSES - 1), max_size=40))
def test_a_bound_holds_over_all_doors_where_nobody_picks_at_the_same_moment(counters, turns):
    control = fleet_of(entry("a", max_inflight=5))
    processes = doors_on(counters, control)
    taken = 0
    for index in turns:
        worker = processes[index].fleet.candidates(None, 0)[0]
        if worker.in_flight < worker.max_inflight:  # no time has passed: read anew all the same
            worker.in_flight += 1
            assert not processes[index].fleet.is_over_limit(worker)
            taken += 1
        assert taken <= 5
    assert taken == min(len(turns), 5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, PROCESSES - 1), st.booleans()), max_size=60))
def test_a_bound_holds_in_whatever_order_doors_look_count_look_again_and_leave(counters, turns):
    """Each step of a taking is one turn, so that others come between any two of them."""
    control = fleet_of(entry("a", max_inflight=2))
    processes = doors_on(counters, control)
    held = [0] * PROCESSES
    half_way: list[str] = [""] * PROCESSES
    for index, leaves in turns:
        fleet = processes[index].fleet
        worker = fleet.workers[0]
        if half_way[index] == "looked":
            worker.in_flight += 1
            half_way[index] = "counted"
        elif half_way[index] == "counted":
            half_way[index] = ""
            if fleet.is_over_limit(worker):
                worker.in_flight -= 1
            else:
                held[index] += 1
        elif leaves and held[index]:
            worker.in_flight -= 1
            held[index] -= 1
        elif has_room(fleet.candidates(None, 0)[0]):
            half_way[index] = "looked"
        assert sum(held) <= 2


def test_whoever_had_to_step_back_leaves_the_place_to_others(counters):
    control = fleet_of(entry("a", max_inflight=1))
    one, other, third = doors_on(counters, control)
    for door in (one, other):  # in the same moment
        door.fleet.workers[0].in_flight += 1
    assert [door.fleet.is_over_limit(door.fleet.workers[0]) for door in (one, other)] == [
        True,
        True,
    ]
    for door in (one, other):
        door.fleet.workers[0].in_flight -= 1
    assert third.sees() == {"http://a:1": 0}
    third.fleet.workers[0].in_flight += 1
    assert not third.fleet.is_over_limit(third.fleet.workers[0])
    assert has_room(one.fleet.candidates(None, 0)[0]) is False


def test_counts_are_not_looked_at_more_often_than_is_worth_it(counters):
    control = fleet_of(*map(entry, NAMES))
    one, other, _ = doors_on(counters, control)
    one.sees()
    other.fleet.workers[0].in_flight += 1
    one.fleet.candidates(None, 0)
    assert one.fleet.workers[0].in_flight == 0
    assert one.sees()["http://a:1"] == 1


def test_a_worker_that_stays_keeps_its_object_and_one_that_came_anew_does_not(counters):
    control = fleet_of(entry("a"), entry("b"))
    door = doors_on(counters, control)[0]
    a, b = door.fleet.workers
    a.in_flight += 1
    b.in_flight += 1
    anew = [rows(control)[0], structs.replace(rows(control)[1], serial=9)]
    door.fleet.follow(anew, NOW)
    assert door.fleet.workers[0] is a
    assert door.fleet.workers[1] is not b
    assert door.sees() == {"http://a:1": 1, "http://b:1": 0}
    b.in_flight -= 1
    assert door.sees() == {"http://a:1": 1, "http://b:1": 0}


def test_nobody_is_let_go_by_half_of_the_news(counters):
    control = fleet_of(entry("a"), entry("b"))
    door = doors_on(counters, control)[0]
    seen = []
    door.fleet.watch(
        lambda: seen.append([w.url for w in door.fleet.candidates(None, ALL_CAPABILITIES)])
    )
    control.cordon(control.workers[1], "paused")
    changed = fleet_of(entry("a", disabled=True), entry("b"))
    news = [rows(changed)[0], rows(control)[1]]
    door.fleet.follow(news, NOW)
    assert seen
    assert all(urls == [] for urls in seen)


def test_what_requests_show_is_told_and_judged_elsewhere(counters):
    door = doors_on(counters, fleet_of(entry("a")))[0]
    worker = door.fleet.workers[0]
    for _ in range(50):
        door.fleet.observe_request_failure(worker, status=502, error="x", at=NOW)
    assert worker.routable
    assert worker.health.failed_requests
    assert door.told == [RequestFailedEvent(1, 502, "x", NOW, 0)] * 50
    door.fleet.observe_success(worker)
    assert door.told[-1] == RequestSucceededEvent(1, 0)
    assert not worker.health.failed_requests


def test_a_trial_is_begun_where_it_may_be_and_the_next_one_when_control_says_so(counters):
    control = fleet_of(entry("a"))
    control.workers[0].health.breaker_tripped = True
    one, other, _ = doors_on(counters, control)
    other.fleet.follow(rows(control, half_open_taken=True), NOW)
    assert other.fleet.candidates(None, 0) == []
    (worker,) = one.fleet.candidates(None, 0)
    trial = one.fleet.begin_half_open(worker)
    assert one.fleet.candidates(None, 0) == []
    one.fleet.follow(rows(control), NOW)  # sent before control had heard of it
    assert one.fleet.candidates(None, 0) == []
    one.fleet.end_half_open(worker, trial)
    assert one.told == [HalfOpenStartedEvent(1, trial), HalfOpenEndedEvent(1, trial)]
    one.fleet.follow(rows(control), NOW)  # still: it knows of no trial
    assert one.fleet.candidates(None, 0) == []
    heard = control.begin_half_open(control.workers[0])
    control.end_half_open(control.workers[0], heard)
    one.fleet.follow(rows(control), NOW)
    assert one.fleet.candidates(None, 0) == [worker]


def test_a_trial_that_went_well_brings_the_worker_back_at_every_door(counters):
    control = fleet_of(entry("a"))
    control.workers[0].health.breaker_tripped = True
    one, other, _ = doors_on(counters, control)
    (worker,) = one.fleet.candidates(None, 0)
    trial = one.fleet.begin_half_open(worker)
    control.begin_half_open(control.workers[0])
    control.observe_success(control.workers[0], control.workers[0].health.half_open_id)
    one.fleet.end_half_open(worker, trial)
    for door in (one, other):
        door.fleet.follow(rows(control), NOW)
        assert len(door.fleet.candidates(None, 0)) == 1
