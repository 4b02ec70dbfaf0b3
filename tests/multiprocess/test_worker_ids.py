import os
import resource
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet
from omni_proxy.multiprocess.shared_counters import FreeSlots, SharedCounters
from omni_proxy.multiprocess.worker_ids import WorkerIds
from tests.fleet.entries import NOW, entry, fleet_of


@pytest.fixture
def roster():
    fleet = fleet_of(entry("any"))
    door = DataPlane(fleet, parse(""), front_socket="/nowhere", below=lambda bound: 0)
    yield WorkerIds(fleet, door)
    door.loop._epoll.close()
    os.close(door.loop._wakeup_fd)


@pytest.fixture
def no_room():
    """Nothing more can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_door_that_could_never_begin_for_want_of_descriptors_can_be_buried(roster, no_room):
    with pytest.raises(OSError, match="Too many open files"):
        _ = roster.board
    assert roster.in_flight_at(1) == 0
    roster.clear(1)
    assert roster.in_flight == 0


@pytest.fixture(scope="module")
def board():
    return SharedCounters.made()


def door_on(board, index):
    return ReplicatedFleet(board, index, lambda: 0.0, lambda message: None)


churn = st.lists(
    st.tuples(
        st.sampled_from(["come", "go", "take", "take", "leave", "die"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(1, 2),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(churn)
def test_workers_that_come_and_go_never_share_a_count(board, steps):
    """More of them than cells, one after the other: each request counts for its own worker."""
    fleet = fleet_of(entry("stable"))
    proxy = DataPlane(fleet, parse(""), front_socket="/nowhere", below=lambda bound: 0)
    roster = WorkerIds(fleet, proxy)
    roster._cells, roster._board, roster.doors = FreeSlots(20), board, 2
    doors = {index: door_on(board, index) for index in (1, 2)}
    here, running = ["stable"], []  # of requests: the door, its worker
    try:
        for what, name, index in [("come", "a", 1), *steps]:
            match what:
                case "come" if name not in here:
                    here.append(name)
                case "go" if name in here:
                    here.remove(name)
                case "take":
                    worker = doors[index].find(f"http://{name}:1") or doors[index].workers[0]
                    if len(running) < 9:
                        worker.in_flight += 1
                        running.append((index, worker))
                case "leave" if running:
                    running.pop(index % len(running))[1].in_flight -= 1
                case "die":
                    roster.clear(index)
                    running = [each for each in running if each[0] != index]
                    doors[index] = door_on(board, index)
            fleet.apply([entry(each) for each in here], NOW)
            for door in doors.values():
                door.reach(2)
                door.follow(roster.rows(), NOW)
            roster.recount()
            known = {roster.serial(worker): worker for worker in fleet.workers}
            wanted = Counter(worker.serial for _, worker in running)
            assert {n: worker.in_flight for n, worker in known.items()} == {
                n: wanted[n] for n in known
            }
            cells = [cell for _, cell in roster._known.values()]
            assert len(set(cells)) == len(cells)
    finally:
        for _, worker in running:
            worker.in_flight -= 1
        proxy.loop._epoll.close()
        os.close(proxy.loop._wakeup_fd)


def test_a_stable_worker_keeps_its_count_while_thousands_come_and_go(roster):
    fleet = roster._fleet
    roster._cells = FreeSlots(8)
    stable = fleet.workers[0]
    own = {roster.rows()[0].cell}
    door = door_on(roster.board, 1)
    roster.doors = 1
    for number in range(50):
        fleet.apply([entry("any"), entry(f"w{number}")], NOW)
        door.reach(1)
        door.follow(roster.rows(), NOW)
        door.find(f"http://w{number}:1").in_flight += 1
        roster.recount()
        assert (stable.in_flight, fleet.workers[1].in_flight) == (0, 1)
        assert roster.rows()[1].cell not in own
        door.find(f"http://w{number}:1").in_flight -= 1
        roster.recount()
