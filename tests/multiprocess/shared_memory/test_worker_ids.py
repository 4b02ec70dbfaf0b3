import os
import resource
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.cluster.peer_counts import MAX_IN_FLIGHT
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet
from omni_proxy.multiprocess.shared_memory.worker_counters import (
    BOUNDS_ROW,
    OFFSETS_ROW,
    SharedCounters,
    WorkerIds,
    unpacked_offset,
)
from tests.example_counts import examples
from tests.fleet.entries import NOW, entry, fleet_of


def ids_of(fleet, **options):
    sources = Sources(lambda bound: 0)
    dataplane = DataPlane(fleet, parse(""), admin_socket="/nowhere", sources=sources)
    return WorkerIds(fleet, dataplane, **options)


@pytest.fixture
def fleet():
    return fleet_of(entry("any"))


@pytest.fixture
def worker_ids(fleet):
    return ids_of(fleet)


@pytest.fixture
def no_descriptors():
    """No more descriptors can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_that_never_started_can_be_cleared(worker_ids, no_descriptors):
    with pytest.raises(OSError, match="Too many open files"):
        _ = worker_ids.counters
    assert worker_ids.in_flight_at(1) == 0
    worker_ids.clear(1)
    assert worker_ids.in_flight == 0


@pytest.fixture(scope="module")
def counters():
    return SharedCounters.create()


def process_fleet(counters, index):
    return ReplicatedFleet(counters, index, lambda: 0.0, lambda message: None)


churn = st.lists(
    st.tuples(
        st.sampled_from(["come", "go", "take", "take", "leave", "die"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(1, 2),
    ),
    max_size=60,
)


@settings(max_examples=examples(100))
@given(churn)
def test_workers_never_share_a_counter_cell(counters, steps):
    """Over time there are more workers than cells; each request counts for its own worker."""
    fleet = fleet_of(entry("stable"))
    worker_ids = ids_of(fleet, cells=20, counters=counters)
    worker_ids.processes = 2
    everyone = set()  # workers that are or were in the fleet
    processes = {index: process_fleet(counters, index) for index in (1, 2)}
    names, running = ["stable"], []  # for each request: the index of its process, its worker
    try:
        for action, name, index in [("come", "a", 1), *steps]:
            match action:
                case "come" if name not in names:
                    names.append(name)
                case "go" if name in names:
                    names.remove(name)
                case "take":
                    worker = (
                        processes[index].find(f"http://{name}:1") or processes[index].workers[0]
                    )
                    if len(running) < 9:
                        worker.in_flight += 1
                        running.append((index, worker))
                case "leave" if running:
                    running.pop(index % len(running))[1].in_flight -= 1
                case "die":
                    worker_ids.clear(index)
                    running = [each for each in running if each[0] != index]
                    processes[index] = process_fleet(counters, index)
            fleet.apply([entry(each) for each in names], NOW)
            for process in processes.values():
                process.reach(2)
                process.follow(worker_ids.rows(), NOW)
            worker_ids.recount()
            known = {worker_ids.serial(worker): worker for worker in fleet.workers}
            expected = Counter(worker.serial for _, worker in running)
            assert {n: worker.in_flight for n, worker in known.items()} == {
                n: expected[n] for n in known
            }
            everyone.update(fleet.workers)
            cells = [ids[1] for ids in map(worker_ids.ids, everyone) if ids is not None]
            assert len(set(cells)) == len(cells)
            assert {worker.serial for _, worker in running} <= {
                ids[0] for ids in map(worker_ids.ids, everyone) if ids is not None
            }
    finally:
        for _, worker in running:
            worker.in_flight -= 1


def test_a_worker_keeps_its_count_while_many_others_change(fleet):
    """Also a removed one, while processes count requests for it."""
    worker_ids = ids_of(fleet, cells=8)
    fleet.apply([entry("any"), entry("removed")], NOW)
    stable, removed = fleet.workers
    in_use = {row.cell for row in worker_ids.rows()}
    dataplane = process_fleet(worker_ids.counters, 1)
    worker_ids.processes = 1

    def check_others(removed_in_flight):
        for number in range(50):
            fleet.apply([entry("any"), entry(f"w{number}")], NOW)
            dataplane.reach(1)
            dataplane.follow(worker_ids.rows(), NOW)
            dataplane.find(f"http://w{number}:1").in_flight += 1
            worker_ids.recount()
            counts = [worker.in_flight for worker in (stable, removed, fleet.workers[1])]
            assert counts == [0, removed_in_flight, 1]
            assert worker_ids.rows()[1].cell not in in_use
            dataplane.find(f"http://w{number}:1").in_flight -= 1
            worker_ids.recount()

    dataplane.reach(1)
    dataplane.follow(worker_ids.rows(), NOW)
    seen_by_process = dataplane.find("http://removed:1")
    seen_by_process.in_flight += 1
    check_others(1)
    seen_by_process.in_flight -= 1
    worker_ids.recount()
    assert removed.in_flight == 0
    seen_by_process.in_flight += 1  # the process had an older snapshot
    check_others(0)


@pytest.mark.parametrize("known_before", [True, False], ids=["a process starts", "a worker joins"])
def test_processes_see_the_cluster_state_of_every_worker_at_once(fleet, worker_ids, known_before):
    if known_before:
        worker_ids.rows()
    else:
        _ = worker_ids.counters
    (worker,) = fleet.workers
    fleet.set_peer_in_flight(worker, 20)
    worker.load_offset, worker.inflight_bound = -19.5, 7
    worker_ids.share_cluster_state(worker)
    process = process_fleet(worker_ids.counters, 1)
    worker_ids.follow_cluster(member=True)
    process.reach(1)
    process.follow(worker_ids.rows(), NOW)
    process.recount()
    (replica,) = process.workers
    assert (replica.load_offset, replica.inflight_bound) == (-19.5, 7)
    if not known_before:  # else from the next count on, as all counts
        assert replica.in_flight == 20


def test_counts_that_no_proxy_can_have_do_not_stop_the_others(fleet, worker_ids):
    (worker,) = fleet.workers
    offsets, bounds = (worker_ids.counters.row(row) for row in (OFFSETS_ROW, BOUNDS_ROW))
    cell = worker_ids.rows()[0].cell
    for offset, bound in ((-3.0 * MAX_IN_FLIGHT, 2**53), (3.0 * MAX_IN_FLIGHT, 2**53)):
        worker.load_offset, worker.inflight_bound = offset, bound
        worker_ids.share_cluster_state(worker)
        assert unpacked_offset(offsets[cell]) / offset > 0.6
        assert bounds[cell] == 2**32 - 1
