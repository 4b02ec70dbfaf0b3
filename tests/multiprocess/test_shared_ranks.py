"""Data-parallel ranks in several processes: shared in-flight counts and limits."""

import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet, shared_ids
from omni_proxy.multiprocess.shared_memory.sessions import (
    SharedSessions,
    WorkerDirectory,
    create_sessions,
)
from omni_proxy.multiprocess.shared_memory.worker_counters import (
    SharedCounters,
    WorkerIds,
)
from omni_proxy.routing.pick import has_room
from tests.example_counts import examples
from tests.fleet.entries import NOW, entry, fleet_of

PROCESSES = 2


class Processes:
    """The main process's fleet, and data-plane processes that follow it."""

    def __init__(self, counters, *entries):
        self.fleet = fleet_of(*entries)
        self.proxy = DataPlane(
            self.fleet, parse(""), admin_socket="/nowhere", sources=Sources(lambda bound: 0)
        )
        self.ids = WorkerIds(self.fleet, self.proxy, cells=60, counters=counters)
        self.ids.processes = PROCESSES
        self.followers = {}
        for index in range(1, PROCESSES + 1):
            self.restart(index)

    def restart(self, index):
        self.ids.clear(index)
        self.followers[index] = ReplicatedFleet(
            self.ids.counters, index, lambda: 0.0, lambda event: None
        )
        self.publish()

    def publish(self):
        for fleet in self.followers.values():
            fleet.reach(PROCESSES)
            fleet.follow(self.ids.rows(), NOW)
        self.ids.recount()


@pytest.fixture(scope="module")
def counters():
    return SharedCounters.create()


steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "begin", "end", "die", "ranks", "discovered"]),
        st.integers(1, PROCESSES),
        st.integers(1, 4),
    ),
    max_size=50,
)


def count(target, requests):
    target.in_flight += requests
    if target.worker is not target:
        target.worker.in_flight += requests


def check(fleet, running):
    by_worker = Counter(target.worker.url for _, target in running)
    by_rank = Counter(target.url for _, target in running if target.worker is not target)
    for worker in fleet.workers:
        assert worker.in_flight == by_worker[worker.url]
        for rank in fleet.known_ranks(worker):
            assert rank.in_flight == by_rank[rank.url]


def ranks_of(fleet):
    return [[rank.url for rank in worker.dp_ranks] for worker in fleet.workers]


@settings(max_examples=examples(80))
@given(steps=steps)
def test_every_process_sees_the_sums_of_each_rank_and_of_its_worker(counters, steps):
    processes = Processes(counters, entry("a", ranks=3), entry("b", ranks="auto"))
    main, running = processes.fleet, []
    try:
        for action, index, number in steps:
            match action:
                case "begin":
                    candidates = processes.followers[index].candidates(None, 1)
                    running.append((index, candidates[number % len(candidates)]))
                    count(running[-1][1], 1)
                case "end" if running:
                    count(running.pop(number % len(running))[1], -1)
                case "die":
                    processes.restart(index)
                    running = [each for each in running if each[0] != index]
                case "ranks":
                    main.apply([entry("a", ranks=number), entry("b", ranks="auto")], NOW)
                case "discovered":
                    main.report_ranks(main.workers[1], number)
            processes.publish()
            check(main, running)
            for fleet in processes.followers.values():
                fleet.recount()
                check(fleet, running)
                assert ranks_of(fleet) == ranks_of(main)
    finally:
        for _, target in running:
            count(target, -1)


@settings(max_examples=examples(150))
@given(turns=st.lists(st.tuples(st.integers(1, PROCESSES), st.integers(0, 2)), max_size=60))
def test_limits_of_ranks_and_their_worker_hold_for_any_order_of_picks(counters, turns):
    """Each step of a pick is one turn, so that other processes run between any two of them. The
    limit of each rank is 2, that of the worker 3."""
    processes = Processes(counters, entry("a", ranks=2, max_inflight=3))
    held = Counter()
    chosen = {}
    try:
        for index, number in turns:
            fleet = processes.followers[index]
            target, step = chosen.get(index, (None, ""))
            if step == "looked":
                count(target, 1)
                chosen[index] = target, "counted"
            elif step == "counted":
                del chosen[index]
                if fleet.is_over_limit(target):
                    count(target, -1)
                else:
                    held[index, target] += 1
            elif number == 2 and any(held.values()):
                key = next(key for key, requests in held.items() if requests)
                held[key] -= 1
                count(key[1], -1)
            else:
                target = fleet.candidates(None, 1)[number % 2]
                if has_room(target):
                    chosen[index] = target, "looked"
            assert sum(held.values()) <= 3
            for rank in (0, 1):
                assert sum(n for (_, at), n in held.items() if at.index == rank) <= 2
    finally:
        for (_, target), requests in held.items():
            count(target, -requests)
        for target, step in chosen.values():
            count(target, -1 if step == "counted" else 0)


def test_a_session_of_one_process_keeps_its_rank_in_all_processes(counters):
    processes = Processes(counters, entry("a", ranks=4), entry("b"))
    memory = create_sessions()
    tables = [
        SharedSessions(memory, WorkerDirectory(fleet.serial, shared_ids, fleet.targets))
        for fleet in processes.followers.values()
    ]
    main = SharedSessions(
        memory, WorkerDirectory(processes.ids.find, processes.ids.ids, processes.fleet.targets)
    )
    for table in (*tables, main):
        table.tune(100, 0)
    first, second = (fleet.workers[0].dp_ranks[2] for fleet in processes.followers.values())
    tables[0].keep("key", first, 1.0)
    assert tables[1].find("key", 2.0) is second
    assert main.find("key", 2.0) is processes.fleet.workers[0].dp_ranks[2]
    assert [main.count(rank) for rank in processes.fleet.workers[0].dp_ranks] == [0, 0, 1, 0]
    assert len(main) == 1
    os.close(memory)
