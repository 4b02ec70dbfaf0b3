import time

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.routing.routes import match_route
from omni_proxy.telemetry.instruments import (
    LEAST_SECS,
    PARTS,
    SESSIONS,
    STEP_SECS,
    STEPS,
    UNKNOWN_SECS,
    EngineStallDetector,
    HoldTimes,
    Ticker,
)
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import CHAT, ended


async def test_it_beats_once_a_second(autojump_clock, nursery):
    beats = []
    ticker = Ticker(lambda at: beats.append((trio.current_time(), at)), lambda _: None)
    await nursery.start(ticker.run)
    began = trio.current_time()
    await trio.sleep(10.1)
    assert len(beats) == 10
    assert [round(at - began) for at, _ in beats] == list(range(1, 11))
    assert abs(beats[-1][1] - time.time()) < 60
    assert sum(ticker.lag.counts) >= 10 * STEPS


async def test_the_ticker_measures_a_blocked_loop(mock_clock, nursery):
    beats = []
    ticker = Ticker(beats.append, lambda _: None)
    await nursery.start(ticker.run)
    await wait_all_tasks_blocked()
    mock_clock.jump(1.0)  # as if a task had run for so long
    await wait_all_tasks_blocked()
    for _ in range(STEPS - 1):
        mock_clock.jump(STEP_SECS)
        await wait_all_tasks_blocked()
    assert ticker.lag.sum == pytest.approx(1.0 - STEP_SECS)
    assert ticker.worst_secs == pytest.approx(1.0 - STEP_SECS)
    assert len(beats) == 1


@pytest.fixture
def fleet():
    return fleet_of(*(entry(name) for name in "abcdefg"))


@pytest.fixture
def stall_detector(fleet, meters, recent):
    return EngineStallDetector(fleet, meters, recent)


def busy(worker, traffic="generation"):
    worker.in_flight += 1
    worker.add_counts(traffic, routed=1)


def passed(stall_detector, begin, end):
    for second in range(begin, end):
        stall_detector.tick(float(second))


def answered(meters, worker):
    """One that began after 0.2 s."""
    meters.record(ended(worker), worker)
    worker.add_counts("generation", succeeded=1)


def test_a_silent_worker_with_requests_is_reported_after_a_while(fleet, meters, stall_detector):
    for worker in fleet.workers:
        answered(meters, worker)
    stuck, idle, *_ = fleet.workers
    busy(stuck)
    passed(stall_detector, 0, 60)
    reported = stall_detector.silent_secs(stuck, 60.0)
    assert reported is not None
    assert 60 - PARTS <= reported <= 60
    assert stall_detector.silent_secs(stuck, LEAST_SECS - 1) is None
    assert all(
        stall_detector.silent_secs(worker, 60.0) is None
        for worker in fleet.workers
        if worker is not stuck
    )
    assert stall_detector.silent_secs(idle, 60.0) is None


def test_a_piece_of_a_stream_is_a_sign_of_life_at_once(fleet, meters, stall_detector):
    worker = fleet.workers[-1]
    answered(meters, worker)
    busy(worker)
    passed(stall_detector, 0, 40)
    assert stall_detector.silent_secs(worker, 40.0) is not None
    meters.series_for(CHAT.path, worker).between.observe(38.0)
    assert stall_detector.silent_secs(worker, 40.0) is None
    passed(stall_detector, 40, 50)
    assert stall_detector.silent_secs(worker, 50.0) is None


def test_an_end_is_one_too(fleet, meters, stall_detector):
    worker = fleet.workers[0]
    answered(meters, worker)
    busy(worker)
    passed(stall_detector, 0, 40)
    worker.add_counts("generation", failed=1)
    assert stall_detector.silent_secs(worker, 40.0) is None


def test_what_usually_takes_long_may_take_long(fleet, meters, stall_detector):
    slow, new = fleet.workers[:2]
    meters.record(
        ended(slow, first_at=120.0, response_head_at=119.0, ended_at=121.0), slow
    )  # after 20 s
    busy(slow)
    busy(new)
    passed(stall_detector, 0, 100)
    assert stall_detector.silent_secs(slow, 45.0) is None
    assert stall_detector.silent_secs(slow, 90.0) is not None
    assert stall_detector.silent_secs(new, UNKNOWN_SECS - 10) is None
    assert stall_detector.silent_secs(new, UNKNOWN_SECS + 10) is not None


def test_having_been_stuck_before_is_not_what_is_usual(fleet, meters, stall_detector):
    worker = fleet.workers[0]
    for _ in range(100):
        answered(meters, worker)
    for _ in range(3):
        meters.record(ended(worker, first_at=200.0, response_head_at=200.0, ended_at=201.0), worker)
    busy(worker)
    passed(stall_detector, 0, 40)
    assert stall_detector.silent_secs(worker, 40.0) is not None


def test_speech_sessions_may_be_silent(fleet, meters, stall_detector):
    worker = fleet.workers[0]
    answered(meters, worker)
    busy(worker, SESSIONS)
    passed(stall_detector, 0, 100)
    assert stall_detector.silent_secs(worker, 100.0) is None
    busy(worker)
    passed(stall_detector, 100, 140)
    assert stall_detector.silent_secs(worker, 140.0) is not None


def test_the_traffic_of_sessions_is_that_of_the_route_table():
    assert match_route("GET", "/v1/audio/speech/stream").traffic == SESSIONS


def test_a_removed_worker_is_forgotten(fleet, meters, stall_detector):
    gone = fleet.workers[:-1]
    for worker in fleet.workers:
        busy(worker)
    passed(stall_detector, 0, PARTS)
    fleet.apply([entry("g")], NOW)
    passed(stall_detector, PARTS, 2 * PARTS)
    assert all(stall_detector.silent_secs(worker, 1000.0) is None for worker in gone)
    assert stall_detector.silent_secs(fleet.workers[0], 1000.0) is not None


def test_a_hold_is_known_since_it_was_first_seen_and_forgotten_when_it_ends():
    fleet = fleet_of(entry("a"), entry("b"))
    holds, worker = HoldTimes(fleet), fleet.workers[0]
    fleet.cordon(worker, "updating")
    holds.tick(10)
    fleet.cordon(worker, "uncertain")
    assert holds.of(worker) == {"updating": 10}
    holds.tick(11)
    assert holds.of(worker) == {"uncertain": 11, "updating": 10}
    fleet.uncordon(worker, "updating")
    assert holds.of(worker) == {"uncertain": 11}
    fleet.uncordon(worker, "uncertain")
    holds.tick(12)
    fleet.cordon(worker, "uncertain")
    holds.tick(13)
    assert (holds.of(worker), holds.of(fleet.workers[1])) == ({"uncertain": 13}, {})
