import pytest

from omni_proxy.routing.routes import match_route
from omni_proxy.telemetry.stall_detector import (
    MIN_SECS,
    PARTS,
    SESSIONS,
    UNKNOWN_SECS,
    EngineStallDetector,
)
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import CHAT, ended


@pytest.fixture
def fleet():
    return fleet_of(*(entry(name) for name in "abcdefg"))


@pytest.fixture
def stall_detector(fleet, meters, recent):
    return EngineStallDetector(fleet, meters, recent)


def begin_request(worker, traffic="generation"):
    worker.in_flight += 1
    worker.add_counts(traffic, routed=1)


def tick_seconds(stall_detector, begin, end):
    for second in range(begin, end):
        stall_detector.tick(float(second))


def record_response(meters, worker):
    """Record an exchange whose response began after 0.2 s."""
    meters.record(ended(worker), worker)
    worker.add_counts("generation", succeeded=1)


def test_a_silent_worker_with_requests_is_reported_after_some_seconds(
    fleet, meters, stall_detector
):
    for worker in fleet.workers:
        record_response(meters, worker)
    stuck, idle, *_ = fleet.workers
    begin_request(stuck)
    tick_seconds(stall_detector, 0, 60)
    silent_secs = stall_detector.silent_secs(stuck, 60.0)
    assert silent_secs is not None
    assert 60 - PARTS <= silent_secs <= 60
    assert stall_detector.silent_secs(stuck, MIN_SECS - 1) is None
    assert all(
        stall_detector.silent_secs(worker, 60.0) is None
        for worker in fleet.workers
        if worker is not stuck
    )
    assert stall_detector.silent_secs(idle, 60.0) is None


def test_a_chunk_of_a_stream_ends_the_silence_at_once(fleet, meters, stall_detector):
    worker = fleet.workers[-1]
    record_response(meters, worker)
    begin_request(worker)
    tick_seconds(stall_detector, 0, 40)
    assert stall_detector.silent_secs(worker, 40.0) is not None
    meters.series_for(CHAT.path, worker).between.observe(38.0)
    assert stall_detector.silent_secs(worker, 40.0) is None
    tick_seconds(stall_detector, 40, 50)
    assert stall_detector.silent_secs(worker, 50.0) is None


def test_the_end_of_a_request_ends_the_silence(fleet, meters, stall_detector):
    worker = fleet.workers[0]
    record_response(meters, worker)
    begin_request(worker)
    tick_seconds(stall_detector, 0, 40)
    worker.add_counts("generation", failed=1)
    assert stall_detector.silent_secs(worker, 40.0) is None


def test_a_worker_that_is_usually_slow_may_be_silent_for_longer(fleet, meters, stall_detector):
    slow, new = fleet.workers[:2]
    meters.record(
        ended(slow, first_at=120.0, response_head_at=119.0, ended_at=121.0), slow
    )  # after 20 s
    begin_request(slow)
    begin_request(new)
    tick_seconds(stall_detector, 0, 100)
    assert stall_detector.silent_secs(slow, 45.0) is None
    assert stall_detector.silent_secs(slow, 90.0) is not None
    assert stall_detector.silent_secs(new, UNKNOWN_SECS - 10) is None
    assert stall_detector.silent_secs(new, UNKNOWN_SECS + 10) is not None


def test_earlier_stalls_do_not_count_as_usual(fleet, meters, stall_detector):
    worker = fleet.workers[0]
    for _ in range(100):
        record_response(meters, worker)
    for _ in range(3):
        meters.record(ended(worker, first_at=200.0, response_head_at=200.0, ended_at=201.0), worker)
    begin_request(worker)
    tick_seconds(stall_detector, 0, 40)
    assert stall_detector.silent_secs(worker, 40.0) is not None


def test_speech_sessions_may_be_silent(fleet, meters, stall_detector):
    worker = fleet.workers[0]
    record_response(meters, worker)
    begin_request(worker, SESSIONS)
    tick_seconds(stall_detector, 0, 100)
    assert stall_detector.silent_secs(worker, 100.0) is None
    begin_request(worker)
    tick_seconds(stall_detector, 100, 140)
    assert stall_detector.silent_secs(worker, 140.0) is not None


def test_the_traffic_of_sessions_is_that_of_the_route_table():
    assert match_route("GET", "/v1/audio/speech/stream").traffic == SESSIONS


def test_a_removed_worker_is_dropped(fleet, meters, stall_detector):
    removed = fleet.workers[:-1]
    for worker in fleet.workers:
        begin_request(worker)
    tick_seconds(stall_detector, 0, PARTS)
    fleet.apply([entry("g")], NOW)
    tick_seconds(stall_detector, PARTS, 2 * PARTS)
    assert all(stall_detector.silent_secs(worker, 1000.0) is None for worker in removed)
    assert stall_detector.silent_secs(fleet.workers[0], 1000.0) is not None
