import tracemalloc

import pytest

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.telemetry.metrics import OTHER, Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.fleet.entries import NOW, entry, fleet_of, heal
from tests.telemetry.ends import CHAT, ended, refused

PATH = "/v1/chat/completions"


@pytest.fixture
def fleet():
    return fleet_of(entry("a", model="m"), entry("b"))


@pytest.fixture
def meters(fleet):
    return Metrics(fleet, RecentWindow())


def total(histogram):
    return sum(histogram.counts)


def test_an_exchange_is_counted_once_where_it_belongs(fleet, meters):
    a, b = fleet.workers
    meters.count(ended(a, model="m"), a)
    meters.count(ended(a, model="m", status=206), a)
    meters.count(ended(b, status=500, outcome="upstream_error", ended_by="worker"), b)
    meters.count(refused(), None)
    assert meters.cells[PATH, a].ends == {("m", 2, "completed"): 2}
    assert meters.cells[PATH, b].ends == {(None, 5, "upstream_error"): 1}
    assert meters.cells[PATH, None].ends == {(None, 5, "refused"): 1}
    cell = meters.cells[PATH, a]
    assert (cell.bytes_in, cell.bytes_out, cell.pieces) == (100, 2000, 20)
    assert (total(cell.total), cell.total.sum) == (2, pytest.approx(2.2))
    assert (total(cell.first), cell.first.sum) == (2, pytest.approx(0.4))


def test_a_cut_that_nobody_named_is_ours(fleet, meters):
    a, _ = fleet.workers
    meters.count(ended(a, outcome=""), a)
    assert meters.cells[PATH, a].ends == {(None, 2, "cut_by_proxy"): 1}


def test_what_is_not_model_traffic_is_the_fronts_or_could_not_be_read(meters):
    meters.count(ended(route=None, need=None, method="GET"), None)
    meters.count(refused(route=None, need=None, method="-", status=400), None)
    assert meters.cells["front", None].ends == {(None, 2, "completed"): 1}
    assert meters.cells["unread", None].ends == {(None, 4, "refused"): 1}
    assert meters.phases["front"].overhead.sum == 0


def test_each_phase_has_its_time(fleet, meters):
    a, _ = fleet.workers
    meters.count(ended(a, queued_secs=1.5, connect_secs=0.003, own_secs=0.002), a)
    meters.count(refused(), None)
    phases = meters.phases[PATH]
    assert (total(phases.queue), phases.queue.sum) == (1, 1.5)
    assert (total(phases.connect), phases.connect.sum) == (1, 0.003)
    assert (total(phases.head), phases.head.sum) == (1, pytest.approx(0.1))
    assert (total(phases.longest_gap), phases.longest_gap.sum) == (1, 0.4)
    assert total(phases.overhead) == 1
    assert phases.overhead.sum >= 0.002


def test_gaps_lie_with_the_worker_that_streams_and_an_end_adds_none(fleet, meters):
    a, b = fleet.workers
    mine = ended(worker=None, last_worker=None)
    mine.worker = a
    gaps = meters.gaps(mine)
    gaps.observe(0.07)
    for worker in fleet.workers:
        meters.count(ended(worker), worker)
    between = meters.cells[PATH, a].between
    assert (total(between), between.sum) == (1, 0.07)
    assert total(meters.cells[PATH, b].between) == 0


def test_the_front_has_no_gaps(meters):
    assert meters.gaps(ended(route=None, need=None, method="GET")) is None


def test_only_a_stream_tells_its_longest_gap(fleet, meters):
    a, _ = fleet.workers
    meters.count(ended(a, stream=False), a)
    meters.count(ended(a, pieces=1, longest_gap=0.0), a)
    assert total(meters.phases[PATH].longest_gap) == 0
    meters.count(ended(a, outcome="stream_error", ended_by="worker"), a)
    assert total(meters.phases[PATH].longest_gap) == 1


def test_tries_count_by_worker_and_cause(fleet, meters):
    a, b = fleet.workers
    tried = [(a, "connect_failure"), (a, "503")]
    meters.count(ended(b, attempts=3, tried=tried), b)
    meters.count(refused(attempts=1, tried=[(a, "connect_failure")], status=502), None)
    assert meters.retries == 2
    assert meters.failed_tries == {(a, "connect_failure"): 2, (a, "503"): 1}


def test_tokens_count_where_the_last_piece_tells_them(fleet, meters):
    a, _ = fleet.workers
    tail = b'data: {"usage":{"prompt_tokens":7,"completion_tokens":9}}\n\n'
    meters.count(ended(a, model="m", tail=b"x" * 20_000 + tail), a)
    meters.count(ended(a, model="m", tail=b"data: {}"), a)
    assert meters.cells[PATH, a].tokens == {("m", "input"): 7, ("m", "output"): 9}


def test_ten_thousand_model_names_are_one(fleet, meters):
    _, b = fleet.workers
    names = [f"model-{i}-{'x' * 300}" for i in range(10_000)]
    for name in names[:500]:
        meters.count(ended(b, model=name), b)
    tracemalloc.start()
    try:
        for name in names:
            meters.count(ended(b, model=name), b)
            meters.count(refused(model=name), None)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert meters.cells[PATH, b].ends == {(OTHER, 2, "completed"): 10_500}
    assert meters.cells[PATH, None].ends == {(OTHER, 5, "refused"): 10_000}
    assert len(meters.cells) == 2
    assert grown < 300_000  # what is kept of recent ends


def test_a_model_that_a_worker_names_keeps_its_name_wherever_it_went(fleet, meters):
    _, b = fleet.workers
    meters.count(ended(b, model="m"), b)
    meters.count(refused(model="m"), None)
    assert meters.cells[PATH, b].ends == {("m", 2, "completed"): 1}
    assert meters.cells[PATH, None].ends == {("m", 5, "refused"): 1}


def without(fleet, *names):
    wanted: list[WorkerSpec] = [entry(name) for name in names]
    fleet.apply(wanted, NOW)


def test_who_has_left_the_fleet_is_forgotten(fleet, meters):
    a, b = fleet.workers
    for worker in (a, b):
        meters.count(ended(worker, attempts=2, tried=[(a, "503")]), worker)
    fleet.mark_dead(a, NOW)
    without(fleet, "b")
    assert set(meters.cells) == {(PATH, b)}
    assert not meters.failed_tries
    assert all(worker is b for worker, _ in meters.health_changes)
    meters.count(ended(a), a)  # its last request ends only now
    meters.forget_strangers()
    assert set(meters.cells) == {(PATH, b)}


def test_workers_that_come_and_go_leave_nothing(fleet, meters):
    for number in range(300):
        without(fleet, f"w{number}")
        (worker,) = fleet.workers
        heal(fleet, worker)
        meters.count(ended(worker, attempts=2, tried=[(worker, "503")]), worker)
    assert len(meters.cells) == 1
    assert len(meters.failed_tries) == 1
    assert len(meters.health_changes) == 1


def test_ejections_and_states_are_heard_of(fleet, meters):
    a, _ = fleet.workers
    for _ in range(fleet.thresholds.fall):
        fleet.observe_request_failure(a, status=None, error="ConnectError", at=NOW)
    assert meters.ejections == {a: 1}
    assert meters.health_changes[a, a.health.state] == 1


def test_the_route_is_the_tables_and_not_the_clients(fleet, meters):
    a, _ = fleet.workers
    meters.count(ended(a, target="/v1/chat/completions?" + "x" * 9000), a)
    assert list(meters.cells) == [(CHAT.path, a)]
