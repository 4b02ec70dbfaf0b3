import pytest

from omni_proxy.telemetry.instruments import STEPS, Instruments
from omni_proxy.wire.load_report import EngineLoad, LoadReport
from tests.fleet.entries import entry, fleet_of
from tests.telemetry.ends import ended, whole

ROUND_SECS = 5  # seconds
START = 1_800_000_000.0
USAGE = (
    b'{"usage": {"prompt_tokens": 40, "completion_tokens": 8, '
    b'"prompt_tokens_details": {"cached_tokens": 30}}}'
)


@pytest.fixture
def fleet():
    return fleet_of(entry("a"), entry("b"))


@pytest.fixture
def instruments(fleet):
    return Instruments(fleet, lambda: (5, 1), {})


def run(instruments, seconds, at=START):
    for second in range(seconds):
        for step in range(STEPS):
            instruments.history_sampler.step(at + second + step / STEPS)
        instruments._on_second(at + second + 0.99)


def test_each_worker_is_read_once_in_each_point_however_late_the_steps_are(fleet, instruments):
    read = []
    sampler = instruments.history_sampler
    sampler.history.sample_worker = lambda at, worker, *_: read.append((at // ROUND_SECS, worker))
    at = START
    for late in range(200):
        sampler.step(at)
        at += 0.05 + late % 7 * 0.02
    points = {point for point, _ in read[:-2]}
    assert len(points) > 3
    for point in points:
        assert [worker for found, worker in read if found == point] == fleet.workers


def test_each_worker_is_read_every_five_seconds(fleet, instruments):
    a, b = fleet.workers
    run(instruments, ROUND_SECS)
    for _ in range(10):
        instruments.metrics.record(whole(a, 0.2), a)
    exchange = ended(a)
    exchange.last_chunk = USAGE
    instruments.metrics.record(exchange, a)
    run(instruments, ROUND_SECS, START + ROUND_SECS)
    history, at = instruments.history, START + 2 * ROUND_SECS - 1

    def newest(of, name):
        return of.read(900, name, at)[-1]

    of_a, of_b = history.workers[a], history.workers[b]
    assert newest(of_a, "requests_per_sec") == pytest.approx(11 / 5)
    assert newest(of_a, "input_tokens_per_sec") == 8
    assert newest(of_a, "output_tokens_per_sec") == pytest.approx(8 / 5)
    assert newest(of_a, "cache_hit_ratio") == 0.75
    assert newest(of_a, "first_p50_ms") == pytest.approx(200, rel=0.2)
    assert newest(of_b, "requests_per_sec") == 0
    assert newest(history.fleet, "requests_per_sec") == pytest.approx(11 / 5)
    assert newest(history.fleet, "cache_hit_ratio") == 0.75
    assert (newest(history.fleet, "in_flight"), newest(history.fleet, "waiting")) == (5, 1)


def test_the_queue_of_a_worker_is_that_of_its_engine_if_it_reports_one(fleet, instruments):
    a, b = fleet.workers
    a.engine_load = EngineLoad(LoadReport(3, None), fleet.loads.now())
    run(instruments, ROUND_SECS)
    found = [
        instruments.history.workers[worker].read(900, "waiting", START + 4)[-1] for worker in (a, b)
    ]
    assert found == [3, None]


def test_removed_workers_are_forgotten(fleet, instruments):
    run(instruments, ROUND_SECS)
    fleet.apply([], fleet.workers[0].registered_at)
    run(instruments, ROUND_SECS, START + ROUND_SECS)
    assert instruments.history.workers == {}
