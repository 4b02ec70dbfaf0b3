import pytest

from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import (
    ENDS_PER_SECOND,
    KEPT_ENDS,
    KEPT_FAILURES,
    POINTS,
    TEXT_CHARS,
)
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import ended, refused, whole


@pytest.fixture
def fleet():
    return fleet_of(entry("a"), entry("b"))


def test_each_second_becomes_a_point(fleet, recent, meters):
    a, _ = fleet.workers
    meters.record(ended(a), a)
    meters.record(refused(), None)
    recent.tick(1000.4, 7, 2)
    recent.tick(1001.4, 6, 0)
    first, second = recent.points
    assert (first.at, first.requests, first.errors, first.in_flight, first.waiting) == (
        1000,
        2,
        1,
        7,
        2,
    )
    assert first.first_p50_ms == pytest.approx(200, rel=0.2)
    assert (second.requests, second.errors, second.first_p50_ms) == (0, 0, None)


def test_the_window_of_a_worker_is_its_last_minute(fleet, recent, meters):
    a, b = fleet.workers
    for second in range(200):
        meters.record(ended(a), a)
        meters.record(ended(a, outcome="stream_error", ended_by="worker", status=200), a)
        recent.tick(1000.0 + second, 0, 0)
    window = recent.worker_window(a, 1200.0)
    assert window.rate == pytest.approx(2, rel=0.2)
    assert 50 <= window.errors <= 60
    assert window.first_p50_ms == pytest.approx(200, rel=0.2)
    assert window.answers == pytest.approx(110, abs=10)
    assert recent.worker_window(b, 1200.0) == (0.0, 0, 0, None, None)


def test_the_window_of_a_worker_has_nothing_older_than_a_minute(fleet, recent, meters):
    a, _ = fleet.workers
    for second in range(100):
        meters.record(whole(a, 0.2), a)
        recent.tick(1000.0 + second, 0, 0)
    for second in range(100, 162):
        recent.tick(1000.0 + second, 0, 0)
        minute = [point for point in recent.points if point.at > 1000 + second - 60]
        window = recent.worker_window(a, 1000.0 + second)
        assert window.answers <= sum(point.requests for point in minute)
    assert window.first_p50_ms is None


def test_the_last_minute_of_the_fleet_includes_the_current_second(fleet, recent, meters):
    a, b = fleet.workers
    recent.tick(1000.0, 0, 0)
    meters.record(whole(a, 0.2), a)
    meters.record(whole(b, 0.2, status=503), b)
    assert recent.last_minute() == (2, 1)
    windows = recent.worker_window(a, 1000.5), recent.worker_window(b, 1000.5)
    assert sum(window.answers for window in windows) == 2
    assert sum(window.errors for window in windows) == 1
    recent.tick(1001.0, 0, 0)
    assert recent.last_minute() == (2, 1)


def test_the_last_minute_of_the_fleet_is_at_least_that_of_its_workers(fleet, recent, meters):
    a, b = fleet.workers
    for second in range(150):
        if second < 90:
            for worker in (a, b):
                meters.record(whole(worker, 0.2), worker)
        answers = [recent.worker_window(worker, 999.5 + second).answers for worker in (a, b)]
        assert recent.last_minute()[0] >= sum(answers)
        recent.tick(1000.0 + second, 0, 0)
    assert recent.last_minute() == (0, 0)


def test_complete_responses_count_in_the_window(fleet, recent, meters):
    a, b = fleet.workers
    for second in range(200):
        for _ in range(3):
            meters.record(whole(a, 0.2), a)
        meters.record(whole(b, 0.2, status=503), b)
        recent.tick(1000.0 + second, 0, 0)
    window = recent.worker_window(a, 1200.0)
    assert (window.rate, window.errors) == (pytest.approx(3, rel=0.2), 0)
    assert window.first_p50_ms == pytest.approx(200, rel=0.2)
    assert recent.worker_window(b, 1200.0).rate == pytest.approx(1, rel=0.2)
    last = recent.points[-1]
    assert (last.requests, last.errors) == (4, 1)
    assert last.first_p50_ms == pytest.approx(200, rel=0.2)
    assert sum(end.end == "completed" for end in recent.ends()) == KEPT_ENDS + KEPT_FAILURES


def test_many_workers_are_gathered_a_few_per_tick(recent):
    fleet = fleet_of(*(entry(f"w{number}") for number in range(100)))
    meters = Metrics(fleet, recent)
    gathered = []
    gather, recent.gather = recent.gather, lambda worker: (gathered.append(worker), gather(worker))
    for second in range(120):
        for worker in fleet.workers:
            meters.record(whole(worker), worker)
        gathered.clear()
        recent.tick(1000.0 + second, 0, 0)
        assert len(gathered) <= 11
    for worker in fleet.workers:
        window = recent.worker_window(worker, 1120.0)
        assert window.rate == pytest.approx(1, rel=0.1)


def test_the_rate_of_a_new_worker_begins_at_its_first_request(fleet, recent, meters):
    a, b = fleet.workers
    for second in range(200):
        meters.record(whole(a), a)
        recent.tick(1000.0 + second, 0, 0)
    for _ in range(10):
        meters.record(whole(b), b)
    assert recent.worker_window(b, 1200.0).rate == pytest.approx(10 / 60, abs=0.01)
    recent.tick(1200.0, 0, 0)
    assert recent.worker_window(b, 1210.0).rate == pytest.approx(10 / 60, abs=0.01)


def test_a_removed_worker_is_dropped_at_once(fleet, recent, meters):
    a, b = fleet.workers
    for second in range(20):
        for worker in (a, b):
            meters.record(whole(worker), worker)
        recent.tick(1000.0 + second, 0, 0)
    fleet.apply([entry("b")], NOW)
    assert set(recent.sums) == {b}
    assert recent.worker_window(a, 1020.0) == (0.0, 0, 0, None, None)
    assert recent.worker_window(b, 1020.0).rate == pytest.approx(1, rel=0.2)


def test_a_worker_without_requests_is_dropped_after_a_minute(fleet, recent, meters):
    a, _ = fleet.workers
    meters.record(ended(a), a)
    for second in range(70):
        recent.tick(1000.0 + second, 0, 0)
    assert recent.worker_window(a, 1070.0) == (0.0, 0, 0, None, None)


def test_the_time_before_sending_a_request_is_not_counted_for_the_worker(fleet, recent, meters):
    a, _ = fleet.workers
    meters.record(ended(a, sent_at=100.15, response_head_at=100.16, queued_secs=0.15), a)
    recent.tick(1000.0, 0, 0)
    assert recent.worker_window(a, 1000.0).first_p50_ms == pytest.approx(50, rel=0.2)
    assert recent.points[0].first_p50_ms == pytest.approx(200, rel=0.2)


@pytest.mark.parametrize(
    ("fields", "errors"),
    [
        ({"status": 500}, 1),
        ({"status": 503}, 1),
        ({"status": 200, "outcome": "stream_error", "ended_by": "worker"}, 1),
        ({"status": 200, "outcome": "", "ended_by": ""}, 1),
        ({"status": 404}, 0),
        ({"status": 200, "outcome": "stream_cancelled", "ended_by": "client"}, 0),
        ({"status": 200, "attempts": 2}, 0),
    ],
)
def test_failures_that_the_client_did_not_cause_are_errors(fleet, recent, meters, fields, errors):
    a, _ = fleet.workers
    meters.record(ended(a, **fields), a)
    recent.tick(1000.0, 0, 0)
    assert recent.points[0].errors == errors
    assert recent.ends()[0].status == fields["status"]


def test_failed_ends_are_kept_longer_than_successful_ones(fleet, recent, meters):
    a, _ = fleet.workers
    meters.record(ended(a, status=502, ended_at=101.0, error="ConnectError"), a)
    for second in range(500):
        meters.record(ended(a, ended_at=102.0 + second), a)
        recent.tick(1000.0 + second, 0, 0)
    ends = recent.ends()
    assert len(ends) == KEPT_ENDS + 1
    assert (ends[0].at, ends[-1].error) == (601.0, "ConnectError")


def test_points_ends_and_texts_are_bounded(fleet, recent, meters):
    a, _ = fleet.workers
    for second in range(2 * POINTS):
        for _ in range(3 * ENDS_PER_SECOND):
            meters.record(ended(a, request_id=b"r" * 9000, error="e" * 9000, status=500), a)
        recent.tick(1000.0 + second, 0, 0)
    assert len(recent.points) == POINTS
    assert len(recent.ends()) == KEPT_FAILURES
    assert {len(end.request_id) for end in recent.ends()} == {TEXT_CHARS}
    assert {len(end.error) for end in recent.ends()} == {TEXT_CHARS}


def test_a_reader_gets_the_points_after_its_last_one(recent):
    for second in range(10):
        recent.tick(1000.0 + second, 0, 0)
    assert [point.at for point in recent.since(1006)] == [1007, 1008, 1009]
    assert [point.at for point in recent.since(0)] == list(range(1000, 1010))
    assert list(recent.since(1009)) == []
