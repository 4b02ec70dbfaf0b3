"""The fleets of several data-plane processes that share counters, all in this process."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.fleet.worker import capability_mask, worker_state
from omni_proxy.multiprocess.ipc.messages import (
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
        self.events: list = []
        self.fleet = ReplicatedFleet(counters, index, lambda: self.now, self.events.append)

    def seen_in_flight(self) -> dict[str, int]:
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
    processes = [ProcessFleet(counters, index) for index in range(1, PROCESSES + 1)]
    for index, process in enumerate(processes, start=1):
        counters.clear(index, 10)
        process.fleet.reach(PROCESSES)
        process.fleet.follow(rows(fleet), NOW)
    return processes


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
    in_flight = {(index, name): 0 for index in range(PROCESSES) for name in NAMES}
    for index, name, action in steps:
        worker = processes[index].fleet.find(f"http://{name}:1")
        if action == "take":
            worker.in_flight += 1
            in_flight[index, name] += 1
        elif action == "leave" and in_flight[index, name]:
            worker.in_flight -= 1
            in_flight[index, name] -= 1
        elif action == "die":
            counters.clear(index + 1, 10)
            in_flight |= {(index, each): 0 for each in NAMES}
            processes[index] = ProcessFleet(counters, index + 1)
            processes[index].fleet.reach(PROCESSES)
            processes[index].fleet.follow(rows(control), NOW)
        expected = {f"http://{n}:1": sum(in_flight[i, n] for i in range(PROCESSES)) for n in NAMES}
        assert [process.seen_in_flight() for process in processes] == [expected] * PROCESSES


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, PROCESSES - 1), max_size=40))
def test_a_limit_holds_over_all_processes_that_pick_one_after_another(counters, turns):
    control = fleet_of(entry("a", max_inflight=5))
    processes = replicas_of(counters, control)
    taken = 0
    for index in turns:
        worker = processes[index].fleet.candidates(None, 0)[0]
        if (
            worker.in_flight < worker.max_inflight
        ):  # the count was read again, though no time has passed
            worker.in_flight += 1
            assert not processes[index].fleet.is_over_limit(worker)
            taken += 1
        assert taken <= 5
    assert taken == min(len(turns), 5)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, PROCESSES - 1), st.booleans()), max_size=60))
def test_a_limit_holds_for_any_order_of_concurrent_picks(counters, turns):
    """Each step of a pick is one turn, so that other processes run between any two of them."""
    control = fleet_of(entry("a", max_inflight=2))
    processes = replicas_of(counters, control)
    held = [0] * PROCESSES
    pending: list[str] = [""] * PROCESSES
    for index, leaves in turns:
        fleet = processes[index].fleet
        worker = fleet.workers[0]
        if pending[index] == "looked":
            worker.in_flight += 1
            pending[index] = "counted"
        elif pending[index] == "counted":
            pending[index] = ""
            if fleet.is_over_limit(worker):
                worker.in_flight -= 1
            else:
                held[index] += 1
        elif leaves and held[index]:
            worker.in_flight -= 1
            held[index] -= 1
        elif has_room(fleet.candidates(None, 0)[0]):
            pending[index] = "looked"
        assert sum(held) <= 2


def test_a_slot_that_a_process_gives_up_is_free_for_other_processes(counters):
    control = fleet_of(entry("a", max_inflight=1))
    one, other, third = replicas_of(counters, control)
    for process in (one, other):  # at the same moment
        process.fleet.workers[0].in_flight += 1
    assert [process.fleet.is_over_limit(process.fleet.workers[0]) for process in (one, other)] == [
        True,
        True,
    ]
    for process in (one, other):
        process.fleet.workers[0].in_flight -= 1
    assert third.seen_in_flight() == {"http://a:1": 0}
    third.fleet.workers[0].in_flight += 1
    assert not third.fleet.is_over_limit(third.fleet.workers[0])
    assert has_room(one.fleet.candidates(None, 0)[0]) is False


def test_recounts_are_rate_limited(counters):
    control = fleet_of(*map(entry, NAMES))
    one, other, _ = replicas_of(counters, control)
    one.seen_in_flight()
    other.fleet.workers[0].in_flight += 1
    one.fleet.candidates(None, 0)
    assert one.fleet.workers[0].in_flight == 0
    assert one.seen_in_flight()["http://a:1"] == 1


def test_a_worker_keeps_its_object_and_a_new_one_with_its_url_gets_another(counters):
    control = fleet_of(entry("a"), entry("b"))
    dataplane = replicas_of(counters, control)[0]
    a, b = dataplane.fleet.workers
    a.in_flight += 1
    b.in_flight += 1
    snapshots = [rows(control)[0], structs.replace(rows(control)[1], serial=9)]
    dataplane.fleet.follow(snapshots, NOW)
    assert dataplane.fleet.workers[0] is a
    assert dataplane.fleet.workers[1] is not b
    assert dataplane.seen_in_flight() == {"http://a:1": 1, "http://b:1": 0}
    b.in_flight -= 1
    assert dataplane.seen_in_flight() == {"http://a:1": 1, "http://b:1": 0}


def test_no_waiter_is_admitted_by_a_partly_applied_snapshot(counters):
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


def test_request_results_are_sent_to_the_main_process_and_do_not_eject_a_worker(counters):
    dataplane = replicas_of(counters, fleet_of(entry("a")))[0]
    worker = dataplane.fleet.workers[0]
    for _ in range(50):
        dataplane.fleet.observe_request_failure(worker, status=502, error="x", at=NOW)
    assert worker.routable
    assert worker.health.failed_requests
    assert dataplane.events == [RequestFailedEvent(1, 502, "x", NOW, 0)] * 50
    dataplane.fleet.observe_success(worker)
    assert dataplane.events[-1] == RequestSucceededEvent(1, 0)
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
    one.fleet.follow(rows(control), NOW)  # sent before the main process received the event
    assert one.fleet.candidates(None, 0) == []
    one.fleet.end_half_open(worker, trial)
    assert one.events == [HalfOpenStartedEvent(1, trial), HalfOpenEndedEvent(1, trial)]
    one.fleet.follow(rows(control), NOW)  # it still has no trial
    assert one.fleet.candidates(None, 0) == []
    main_trial = control.begin_half_open(control.workers[0])
    control.end_half_open(control.workers[0], main_trial)
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
