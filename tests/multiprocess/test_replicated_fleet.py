"""The fleets of several data-plane processes on the same shared counters, in one process: what they see of each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.fleet.worker import capability_mask, worker_state
from omni_proxy.multiprocess.ipc import (
    HalfOpenEndedEvent,
    HalfOpenStartedEvent,
    RequestFailedEvent,
    RequestSucceededEvent,
)
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet
from omni_proxy.multiprocess.shared_memory.worker_counters import SharedCounters
from omni_proxy.routing.pick import has_room
from tests.example_counts import examples
from tests.fleet.entries import NOW, entry, fleet_of

PROCESSES = 3
NAMES = ("a", "b", "c")


class ProcessFleet:
    def __init__(self, counters: SharedCounters, index: int) -> None:
        self.now = 0.0
        self.reported: list = []
        self.fleet = ReplicatedFleet(counters, index, lambda: self.now, self.reported.append)

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


def replicas_of(counters, fleet):
    made = [ProcessFleet(counters, index) for index in range(1, PROCESSES + 1)]
    for index, dataplane in enumerate(made, start=1):
        counters.clear(index, 10)
        dataplane.fleet.reach(PROCESSES)
        dataplane.fleet.follow(rows(fleet), NOW)
    return made


steps = st.lists(
    st.tuples(
        st.integers(0, PROCESSES - 1),
        st.sampled_from(NAMES),
        st.sampled_from(["take", "leave", "die"]),
    ),
    max_size=60,
)


@settings(max_examples=examples(60))
@given(steps)
def test_every_process_sees_the_sum_of_all_in_flight_counts(counters, steps):
    control = fleet_of(*map(entry, NAMES))
    processes = replicas_of(counters, control)
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
            processes[index] = ProcessFleet(counters, index + 1)
            processes[index].fleet.reach(PROCESSES)
            processes[index].fleet.follow(rows(control), NOW)
        wanted = {f"http://{n}:1": sum(have[i, n] for i in range(PROCESSES)) for n in NAMES}
        assert [dataplane.sees() for dataplane in processes] == [wanted] * PROCESSES


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, PROCESSES - 1), max_size=40))
def test_a_limit_holds_over_all_processes_that_pick_one_after_another(counters, turns):
    control = fleet_of(entry("a", max_inflight=5))
    processes = replicas_of(counters, control)
    taken = 0
    for index in turns:
        worker = processes[index].fleet.candidates(None, 0)[0]
        if worker.in_flight < worker.max_inflight:  # no time has passed: read anew all the same
            worker.in_flight += 1
            assert not processes[index].fleet.is_over_limit(worker)
            taken += 1
        assert taken <= 5
    assert taken == min(len(turns), 5)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, PROCESSES - 1), st.booleans()), max_size=60))
def test_a_limit_holds_for_any_order_of_concurrent_picks(counters, turns):
    """Each step of a taking is one turn, so that others come between any two of them."""
    control = fleet_of(entry("a", max_inflight=2))
    processes = replicas_of(counters, control)
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


def test_a_process_that_gave_up_a_slot_leaves_it_to_others(counters):
    control = fleet_of(entry("a", max_inflight=1))
    one, other, third = replicas_of(counters, control)
    for dataplane in (one, other):  # in the same moment
        dataplane.fleet.workers[0].in_flight += 1
    assert [
        dataplane.fleet.is_over_limit(dataplane.fleet.workers[0]) for dataplane in (one, other)
    ] == [
        True,
        True,
    ]
    for dataplane in (one, other):
        dataplane.fleet.workers[0].in_flight -= 1
    assert third.sees() == {"http://a:1": 0}
    third.fleet.workers[0].in_flight += 1
    assert not third.fleet.is_over_limit(third.fleet.workers[0])
    assert has_room(one.fleet.candidates(None, 0)[0]) is False


def test_recounts_are_rate_limited(counters):
    control = fleet_of(*map(entry, NAMES))
    one, other, _ = replicas_of(counters, control)
    one.sees()
    other.fleet.workers[0].in_flight += 1
    one.fleet.candidates(None, 0)
    assert one.fleet.workers[0].in_flight == 0
    assert one.sees()["http://a:1"] == 1


def test_a_kept_worker_keeps_its_object_and_a_new_one_with_its_url_does_not(counters):
    control = fleet_of(entry("a"), entry("b"))
    dataplane = replicas_of(counters, control)[0]
    a, b = dataplane.fleet.workers
    a.in_flight += 1
    b.in_flight += 1
    anew = [rows(control)[0], structs.replace(rows(control)[1], serial=9)]
    dataplane.fleet.follow(anew, NOW)
    assert dataplane.fleet.workers[0] is a
    assert dataplane.fleet.workers[1] is not b
    assert dataplane.sees() == {"http://a:1": 1, "http://b:1": 0}
    b.in_flight -= 1
    assert dataplane.sees() == {"http://a:1": 1, "http://b:1": 0}


def test_no_waiter_is_admitted_by_half_of_a_snapshot(counters):
    control = fleet_of(entry("a"), entry("b"))
    dataplane = replicas_of(counters, control)[0]
    seen = []
    dataplane.fleet.watch(
        lambda: seen.append(
            [w.url for w in dataplane.fleet.candidates(None, capability_mask(CAPABILITIES))]
        )
    )
    control.cordon(control.workers[1], "paused")
    changed = fleet_of(entry("a", disabled=True), entry("b"))
    snapshots = [rows(changed)[0], rows(control)[1]]
    dataplane.fleet.follow(snapshots, NOW)
    assert seen
    assert all(urls == [] for urls in seen)


def test_request_results_are_reported_and_not_judged_here(counters):
    dataplane = replicas_of(counters, fleet_of(entry("a")))[0]
    worker = dataplane.fleet.workers[0]
    for _ in range(50):
        dataplane.fleet.observe_request_failure(worker, status=502, error="x", at=NOW)
    assert worker.routable
    assert worker.health.failed_requests
    assert dataplane.reported == [RequestFailedEvent(1, 502, "x", NOW, 0)] * 50
    dataplane.fleet.observe_success(worker)
    assert dataplane.reported[-1] == RequestSucceededEvent(1, 0)
    assert not worker.health.failed_requests


def test_a_half_open_request_needs_the_lease_of_the_main_process(counters):
    control = fleet_of(entry("a"))
    control.workers[0].health.breaker_tripped = True
    one, other, _ = replicas_of(counters, control)
    other.fleet.follow(rows(control, half_open_taken=True), NOW)
    assert other.fleet.candidates(None, 0) == []
    (worker,) = one.fleet.candidates(None, 0)
    trial = one.fleet.begin_half_open(worker)
    assert one.fleet.candidates(None, 0) == []
    one.fleet.follow(rows(control), NOW)  # sent before control had heard of it
    assert one.fleet.candidates(None, 0) == []
    one.fleet.end_half_open(worker, trial)
    assert one.reported == [HalfOpenStartedEvent(1, trial), HalfOpenEndedEvent(1, trial)]
    one.fleet.follow(rows(control), NOW)  # still: it knows of no trial
    assert one.fleet.candidates(None, 0) == []
    heard = control.begin_half_open(control.workers[0])
    control.end_half_open(control.workers[0], heard)
    one.fleet.follow(rows(control), NOW)
    assert one.fleet.candidates(None, 0) == [worker]


def test_a_half_open_success_returns_the_worker_in_every_process(counters):
    control = fleet_of(entry("a"))
    control.workers[0].health.breaker_tripped = True
    one, other, _ = replicas_of(counters, control)
    (worker,) = one.fleet.candidates(None, 0)
    trial = one.fleet.begin_half_open(worker)
    control.begin_half_open(control.workers[0])
    control.observe_success(control.workers[0], control.workers[0].health.half_open_id)
    one.fleet.end_half_open(worker, trial)
    for dataplane in (one, other):
        dataplane.fleet.follow(rows(control), NOW)
        assert len(dataplane.fleet.candidates(None, 0)) == 1
