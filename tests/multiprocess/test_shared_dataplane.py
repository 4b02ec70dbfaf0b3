import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.multiprocess.replicated_fleet import SharedWorker
from omni_proxy.multiprocess.shared_counters import SharedCounters
from omni_proxy.multiprocess.shared_dataplane import WAYS, SharedSessions, create_sessions
from tests.fleet.entries import NOW, entry


@pytest.fixture(scope="module")
def row():
    return SharedCounters.create().row(1)


def world(row, count=4):
    workers = {n: SharedWorker(entry(f"w{n}"), NOW, (n, n), row) for n in range(1, count + 1)}
    descriptor = create_sessions()
    processes = [SharedSessions(os.dup(descriptor), workers.get) for _ in range(2)]
    os.close(descriptor)
    for dataplane in processes:
        dataplane.tune(100_000, 60.0)
    return workers, processes


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.text(max_size=3), st.integers(1, 4), st.integers(0, 40)),
        max_size=60,
    )
)
def test_two_processes_agree_with_a_plain_table(row, steps):
    workers, processes = world(row)
    table, now = {}, 0.0
    for dataplane, key, serial, secs in steps:
        now += secs
        kept = table.get(key)
        wanted = kept[0] if kept and now - kept[1] <= 60 else None
        assert processes[dataplane].find(key, now) is wanted
        if wanted is None:
            processes[1 - dataplane].keep(key, workers[serial], now)
            table[key] = (workers[serial], now)


def test_above_the_limit_the_sessions_used_last_stay(row):
    workers, (one, other) = world(row)
    for dataplane in (one, other):
        dataplane.tune(WAYS, 0.0)
    for number in range(3 * WAYS):
        one.keep(f"k{number}", workers[1], float(number))
        one.keep("again", workers[2], float(number))
    assert other.find("again", 99.0) is workers[2]
    assert other.find(f"k{3 * WAYS - 1}", 99.0) is workers[1]
    assert other.find("k0", 99.0) is None
    assert len(other) == WAYS


def test_a_session_of_a_removed_worker_is_not_found(row):
    workers, (one, other) = world(row)
    one.keep("me", workers[3], 0.0)
    del workers[3]
    assert other.find("me", 1.0) is None


def test_the_estimated_number_of_sessions_is_about_right(row):
    workers, (one, other) = world(row)
    for number in range(40_000):
        one.keep(str(number), workers[1], 1.0)
    assert 30_000 < len(other) < 50_000
