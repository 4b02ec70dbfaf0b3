import mmap
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.cluster.session_places import session_digest
from omni_proxy.multiprocess.replicated_fleet import SharedWorker
from omni_proxy.multiprocess.shared_memory.sessions import (
    ALL_BYTES,
    COUNTS_AT,
    SESSION_BYTES,
    WAYS,
    SharedSessions,
    WorkerDirectory,
    create_sessions,
)
from omni_proxy.multiprocess.shared_memory.worker_counters import SharedCounters
from tests.example_counts import examples
from tests.fleet.entries import NOW, entry


@pytest.fixture(scope="module")
def row():
    return SharedCounters.create().row(1)


MAX_SESSIONS = 100_000
SLICE_BYTES = 64 * 1024
SLICES = -(-MAX_SESSIONS * SESSION_BYTES // SLICE_BYTES)


def directory_of(row, count=4):
    workers = {n: SharedWorker(entry(f"w{n}"), NOW, (n, n), row) for n in range(1, count + 1)}
    directory = WorkerDirectory(
        workers.get, lambda worker: (worker.serial, worker.cell), workers.values
    )
    return workers, directory


def processes_of(descriptor, directory):
    """The main process's sessions, and those of another process."""
    processes = [
        SharedSessions(os.dup(descriptor), directory, recounts=main, slice_bytes=SLICE_BYTES)
        for main in (True, False)
    ]
    for process in processes:
        process.tune(MAX_SESSIONS, 60.0)
    return processes


def setup_of(row, count=4):
    workers, directory = directory_of(row, count)
    descriptor = create_sessions()
    processes = processes_of(descriptor, directory)
    os.close(descriptor)
    return workers, processes


def counts(sessions, workers):
    return [sessions.count(worker) for worker in workers.values()]


def recount(main, now):
    """Finishes a pass over the table that has begun, and makes at least one whole pass."""
    for _ in range(2 * SLICES):
        main.maintain(now)


@settings(max_examples=examples(50))
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.text(max_size=3), st.integers(1, 4), st.integers(0, 40)),
        max_size=60,
    )
)
def test_two_processes_agree_with_a_plain_table(row, steps):
    workers, processes = setup_of(row)
    table, now = {}, 0.0
    for index, key, serial, secs in steps:
        now += secs
        placed = table.get(key)
        expected = placed[0] if placed and now - placed[1] <= 60 else None
        assert processes[index].find(key, now) is expected
        if expected is None:
            processes[1 - index].keep(key, workers[serial], now)
            table[key] = (workers[serial], now)
        recount(processes[0], now)
        live_workers = [worker for worker, used in table.values() if now - used <= 60]
        assert counts(processes[1], workers) == [
            live_workers.count(worker) for worker in workers.values()
        ]


def test_above_the_limit_the_sessions_used_last_stay(row):
    workers, (one, other) = setup_of(row)
    for process in (one, other):
        process.tune(WAYS, 0.0)
    for number in range(3 * WAYS):
        one.keep(f"k{number}", workers[1], float(number))
        one.keep("again", workers[2], float(number))
    assert other.find("again", 99.0) is workers[2]
    assert other.find(f"k{3 * WAYS - 1}", 99.0) is workers[1]
    assert other.find("k0", 99.0) is None
    assert len(other) == WAYS


def test_a_session_of_a_removed_worker_is_not_found(row):
    workers, (one, other) = setup_of(row)
    one.keep("me", workers[3], 0.0)
    del workers[3]
    assert other.find("me", 1.0) is None


def test_a_session_of_another_proxy_is_not_counted_if_the_policy_keeps_no_sessions(row):
    workers, (tuned, _) = setup_of(row)
    descriptor = create_sessions()
    directory = WorkerDirectory(workers.get, lambda worker: (worker.serial, worker.cell), list)
    untuned = SharedSessions(descriptor, directory, recounts=True)
    digest = session_digest("me")
    for worker in (workers[1], None):
        untuned.place(digest, worker, 1.0)
    assert counts(untuned, workers) == counts(tuned, workers) == [0, 0, 0, 0]


def test_every_process_sees_the_number_of_sessions_of_a_worker(row):
    workers, (one, other) = setup_of(row)
    for number in range(40):
        one.keep(f"{number}", workers[1 + number % 2], 1.0)
        other.keep(f"{number}", workers[1 + number % 2], 1.0)  # the same session again
    assert counts(one, workers) == counts(other, workers) == [20, 20, 0, 0]
    other.keep("0", workers[4], 2.0)
    assert [one.finish("2"), other.finish("2"), other.finish("nobody")] == [True, False, False]
    assert counts(one, workers) == [18, 20, 0, 1]
    assert (len(one), len(other)) == (39, 39)


def test_a_finished_session_is_found_in_no_process_and_has_no_duplicate(row):
    workers, (one, other) = setup_of(row)
    for dataplane in (one, other):
        dataplane.tune(WAYS, 0.0)  # one bucket
    for number in range(WAYS):
        one.keep(f"{number}", workers[1], 1.0)
    one.finish("0")
    other.keep(f"{WAYS - 1}", workers[2], 2.0)  # an earlier place is free
    assert one.finish(f"{WAYS - 1}")
    assert other.find(f"{WAYS - 1}", 3.0) is None
    assert counts(other, workers) == [WAYS - 2, 0, 0, 0]


def test_an_evicted_session_no_longer_counts(row):
    workers, (one, _) = setup_of(row)
    one.tune(WAYS, 0.0)
    for number in range(WAYS):
        one.keep(f"{number}", workers[1], float(number))
    one.keep("late", workers[2], 99.0)
    assert counts(one, workers) == [WAYS - 1, 1, 0, 0]


def test_the_main_process_corrects_counts_that_lost_an_update(row):
    workers, directory = directory_of(row)
    descriptor = create_sessions()
    main, other = processes_of(descriptor, directory)
    for number in range(50):
        other.keep(f"{number}", workers[1], 1.0)
    # Processes that write the count of a worker at once.
    stored_counts = memoryview(mmap.mmap(descriptor, ALL_BYTES))[COUNTS_AT:].cast("i")
    os.close(descriptor)
    stored_counts[1] -= 7
    stored_counts[2] = 3
    stored_counts[3] = -3
    assert counts(other, workers) == [43, 3, 0, 0]  # never negative
    recount(main, 2.0)
    assert counts(other, workers) == [50, 0, 0, 0]
    assert stored_counts[3] == 0


def test_expired_sessions_no_longer_count_after_the_next_pass(row):
    workers, (main, other) = setup_of(row)
    other.keep("idle", workers[1], 0.0)
    other.keep("used", workers[1], 50.0)
    recount(main, 61.0)
    assert counts(other, workers) == [1, 0, 0, 0]


def test_counts_that_change_during_a_pass_are_not_corrected(row):
    workers, (main, other) = setup_of(row)
    begun = 0
    for _ in range(3 * SLICES):
        main.maintain(1.0)
        for _ in range(9):
            other.keep(f"{begun}", workers[1], 1.0)
            begun += 1
        assert other.count(workers[1]) == begun
    recount(main, 1.0)
    assert other.count(workers[1]) == begun
    while begun:
        main.maintain(1.0)
        begun -= 1
        other.finish(f"{begun}")
        assert other.count(workers[1]) == begun


def test_a_changed_limit_drops_all_sessions_and_their_counts(row):
    workers, (main, other) = setup_of(row)
    for number in range(50):
        other.keep(f"{number}", workers[1], 1.0)
    for dataplane in (main, other):
        dataplane.tune(1000, 60.0)
    recount(main, 1.0)
    assert counts(other, workers) == [0, 0, 0, 0]
    assert other.find("7", 1.0) is None
    other.keep("7", workers[2], 1.0)
    assert main.find("7", 1.0) is workers[2]


@given(
    st.dictionaries(
        st.text(max_size=4), st.tuples(st.integers(1, 4), st.integers(0, 40)), max_size=30
    ),
    st.integers(1, 40),
)
@settings(max_examples=examples(30))
def test_a_successor_table_gets_the_most_recently_used_sessions(row, sessions, most):
    workers, (main, other) = setup_of(row)
    new_workers, (new, _) = setup_of(row, 3)  # the fourth worker was removed
    for number, (key, (at, used)) in enumerate(sessions.items()):
        (main, other)[number % 2].keep(key, workers[at], used)
    by_url = {worker.url: worker for worker in new_workers.values()}
    rows = main.rows(most)
    assert new.restore(rows, by_url.get) == len(
        [session for session in rows.sessions if session[2] in by_url]
    )
    kept_times = sorted((used for _, used in sessions.values()), reverse=True)[:most]
    assert [used_ms for used_ms, _, _ in rows.sessions] == [used * 1000 for used in kept_times]
    for key, (at, used) in sessions.items():
        worker = new.find(key, 41)
        if used < kept_times[-1] or at == 4:
            assert worker is None
        elif used > kept_times[-1]:
            assert worker is new_workers[at]


def test_a_table_with_a_session_or_with_another_size_keeps_its_own(row):
    workers, (main, _) = setup_of(row)
    _, (new, smaller) = setup_of(row)
    main.keep("a", workers[1], 5.0)
    main.keep("b", workers[1], 5.0)
    new.keep("a", workers[2], 6.0)
    by_url = {worker.url: worker for worker in workers.values()}
    assert new.restore(main.rows(9), by_url.get) == 1
    assert (new.find("a", 7.0).url, new.find("b", 7.0).url) == (workers[2].url, workers[1].url)
    smaller.tune(800, 60.0)
    assert smaller.restore(main.rows(9), by_url.get) == 0
