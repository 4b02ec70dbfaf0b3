import tracemalloc

import pytest

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.telemetry.metrics import ADMIN_API, OTHER, UNREAD, Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import CHAT, ended, refused

PATH = "/v1/chat/completions"


@pytest.fixture
def fleet():
    return fleet_of(entry("a", model="m"), entry("b"))


@pytest.fixture
def meters(fleet):
    return Metrics(fleet, RecentWindow())


def total_count(histogram):
    return sum(histogram.counts)


def test_an_exchange_is_counted_once_in_the_series_of_its_worker(fleet, meters):
    a, b = fleet.workers
    meters.record(ended(a, model="m"), a)
    meters.record(ended(a, model="m", status=206), a)
    meters.record(ended(b, status=500, outcome="upstream_error", ended_by="worker"), b)
    meters.record(refused(), None)
    assert meters.series[PATH, a].ends == {("m", 2, "completed"): 2}
    assert meters.series[PATH, b].ends == {(None, 5, "upstream_error"): 1}
    assert meters.series[PATH, None].ends == {(None, 5, "refused"): 1}
    cell = meters.series[PATH, a]
    assert (cell.bytes_in, cell.bytes_out, cell.chunks) == (100, 2000, 20)
    assert (total_count(cell.total), cell.total.sum) == (2, pytest.approx(2.2))
    assert (total_count(cell.first), cell.first.sum) == (2, pytest.approx(0.4))


def test_an_unclassified_abort_counts_as_cut_by_proxy(fleet, meters):
    a, _ = fleet.workers
    meters.record(ended(a, outcome=""), a)
    assert meters.series[PATH, a].ends == {(None, 2, "cut_by_proxy"): 1}


def test_an_exchange_of_the_admin_api_has_a_series_of_its_own_without_overhead(meters):
    meters.record(ended(route=None, requirements=None, method="GET"), None)
    assert meters.series[ADMIN_API, None].ends == {(None, 2, "completed"): 1}
    assert meters.phases[ADMIN_API].overhead.sum == 0


def test_a_request_without_a_readable_head_has_a_series_of_its_own(meters):
    meters.record(refused(route=None, requirements=None, method="-", status=400), None)
    assert meters.series[UNREAD, None].ends == {(None, 4, "refused"): 1}


def test_each_phase_is_timed(fleet, meters):
    a, _ = fleet.workers
    meters.record(ended(a, queued_secs=1.5, connect_secs=0.003, own_secs=0.002), a)
    meters.record(refused(), None)
    phases = meters.phases[PATH]
    assert (total_count(phases.queue), phases.queue.sum) == (1, 1.5)
    assert (total_count(phases.connect), phases.connect.sum) == (1, 0.003)
    assert (total_count(phases.head), phases.head.sum) == (1, pytest.approx(0.1))
    assert (total_count(phases.longest_gap), phases.longest_gap.sum) == (1, 0.4)
    assert total_count(phases.overhead) == 1
    assert phases.overhead.sum >= 0.002


def test_a_gap_is_counted_when_it_ends_for_the_worker_that_streams(fleet, meters):
    a, b = fleet.workers
    exchange = ended(worker=None, last_worker=None)
    exchange.worker = a
    histogram = meters.gap_histogram(exchange)
    histogram.observe(0.07)
    for worker in fleet.workers:
        meters.record(ended(worker), worker)
    between = meters.series[PATH, a].between
    assert (total_count(between), between.sum) == (1, 0.07)
    assert total_count(meters.series[PATH, b].between) == 0


def test_exchanges_of_the_admin_api_have_no_gaps(meters):
    assert meters.gap_histogram(ended(route=None, requirements=None, method="GET")) is None


def test_only_a_stream_reports_its_longest_gap(fleet, meters):
    a, _ = fleet.workers
    meters.record(ended(a, stream=False), a)
    meters.record(ended(a, chunks=1, longest_gap=0.0), a)
    assert total_count(meters.phases[PATH].longest_gap) == 0
    meters.record(ended(a, outcome="stream_error", ended_by="worker"), a)
    assert total_count(meters.phases[PATH].longest_gap) == 1


def test_failed_attempts_are_counted_by_worker_and_cause(fleet, meters):
    a, b = fleet.workers
    failed = [(a, "connect_failure"), (a, "503")]
    meters.record(ended(b, attempts=3, failed_attempts=failed), b)
    meters.record(refused(attempts=1, failed_attempts=[(a, "connect_failure")], status=502), None)
    assert meters.retries == 2
    assert meters.failed_attempts == {(a, "connect_failure"): 2, (a, "503"): 1}


def test_tokens_of_the_last_chunk_are_counted(fleet, meters):
    a, _ = fleet.workers
    tail = b'data: {"usage":{"prompt_tokens":7,"completion_tokens":9}}\n\n'
    meters.record(ended(a, model="m", last_chunk=b"x" * 20_000 + tail), a)
    meters.record(ended(a, model="m", last_chunk=b"data: {}"), a)
    assert meters.series[PATH, a].tokens == {("m", "input"): 7, ("m", "output"): 9}


def test_ten_thousand_model_names_are_one_label(fleet, meters):
    _, b = fleet.workers
    names = [f"model-{i}-{'x' * 300}" for i in range(10_000)]
    for name in names[:500]:
        meters.record(ended(b, model=name), b)
    tracemalloc.start()
    try:
        for name in names:
            meters.record(ended(b, model=name), b)
            meters.record(refused(model=name), None)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert meters.series[PATH, b].ends == {(OTHER, 2, "completed"): 10_500}
    assert meters.series[PATH, None].ends == {(OTHER, 5, "refused"): 10_000}
    assert len(meters.series) == 2
    assert grown < 300_000  # the size of the recent ends


def test_a_model_of_any_worker_keeps_its_name_in_all_series(fleet, meters):
    _, b = fleet.workers
    meters.record(ended(b, model="m"), b)
    meters.record(refused(model="m"), None)
    assert meters.series[PATH, b].ends == {("m", 2, "completed"): 1}
    assert meters.series[PATH, None].ends == {("m", 5, "refused"): 1}


def replace_workers(fleet, *names):
    specs: list[WorkerSpec] = [entry(name) for name in names]
    fleet.apply(specs, NOW)


def test_the_series_of_a_removed_worker_are_dropped(fleet, meters):
    a, b = fleet.workers
    for worker in (a, b):
        meters.record(ended(worker, attempts=2, failed_attempts=[(worker, "503")]), worker)
        fleet.mark_dead(worker, NOW)
    replace_workers(fleet, "b")
    assert set(meters.series) == {(PATH, b)}
    assert set(meters.failed_attempts) == {(b, "503")}
    assert {worker for worker, _ in meters.health_changes} == {b}


def test_an_exchange_that_ends_after_the_removal_of_its_worker_leaves_no_series(fleet, meters):
    a, _ = fleet.workers
    replace_workers(fleet, "b")
    meters.record(ended(a, attempts=2, failed_attempts=[(a, "503")]), a)
    meters.drop_removed_workers()
    assert not meters.series
    assert not meters.failed_attempts


def test_ejections_and_states_are_reported(fleet, meters):
    a, _ = fleet.workers
    for _ in range(fleet.thresholds.fall):
        fleet.observe_request_failure(a, status=None, error="ConnectError", at=NOW)
    assert meters.ejections == {a: 1}
    assert meters.health_changes[a, a.health.state] == 1


def test_the_route_label_is_a_route_of_the_table(fleet, meters):
    a, _ = fleet.workers
    meters.record(ended(a, target="/v1/chat/completions?" + "x" * 9000), a)
    assert list(meters.series) == [(CHAT.path, a)]
