import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.telemetry.histogram import BETWEEN_CHUNKS, FINE
from omni_proxy.telemetry.history import (
    MAX_WORKERS,
    POINTS,
    STEPS,
    Bin,
    History,
    Track,
    WorkerTotals,
    start_of,
)
from omni_proxy.telemetry.instruments import STEPS as TICKS
from omni_proxy.telemetry.instruments import Instruments
from omni_proxy.wire.load_report import EngineLoad, LoadReport
from tests.fleet.entries import entry, fleet_of
from tests.telemetry.ends import ended, whole

START = 1_800_000_000.0
NOTHING = [None] * POINTS


def first_counts(**counts):
    """The counts of all buckets; `at_3=2` sets that of bucket 3."""
    counts_by_bucket = [0] * (len(FINE) + 1)
    for name, count in counts.items():
        counts_by_bucket[int(name.removeprefix("at_"))] = count
    return counts_by_bucket


def test_rates_are_counts_divided_by_the_seconds_between_two_samples():
    track = Track()
    track.sample(START, WorkerTotals(requests=100), 0)
    track.sample(START + 5, WorkerTotals(requests=110, errors=5, output_tokens=50), 4)
    at = START + 5
    assert track.read(900, "requests_per_sec", at)[-1] == 2
    assert track.read(900, "errors_per_sec", at)[-1] == 1
    assert track.read(900, "output_tokens_per_sec", at)[-1] == 10
    assert track.read(900, "in_flight", at)[-1] == 4


def test_the_first_sample_has_no_rates():
    track = Track()
    track.sample(START, WorkerTotals(requests=1000), 2)
    assert track.read(900, "requests_per_sec", START) == NOTHING
    assert track.read(900, "in_flight", START)[-1] == 2


def test_totals_that_decreased_were_reset():
    track = Track()
    for at, count in ((0, 10), (5, 3), (10, 8)):
        track.sample(START + at, WorkerTotals(requests=count), 0)
    assert track.read(900, "requests_per_sec", START + 10)[-3:] == [None, 0, 1]


def test_tokens_are_unknown_until_a_response_reports_some():
    track = Track()
    for at in (0, 5):
        track.sample(START + at, WorkerTotals(requests=at), 0)
    assert track.read(900, "output_tokens_per_sec", START + 5) == NOTHING
    for at in (10, 15):
        track.sample(START + at, WorkerTotals(requests=at, output_tokens=50), 0)
    assert track.read(900, "output_tokens_per_sec", START + 15)[-2:] == [10, 0]


def test_quantiles_are_those_of_one_step():
    track = Track()
    track.sample(START, WorkerTotals(firsts=first_counts(at_5=1000)), 0)
    track.sample(START + 5, WorkerTotals(firsts=first_counts(at_5=1000, at_40=10)), 0)
    p50 = track.read(900, "first_p50_ms", START + 5)[-1]
    assert FINE[39] * 1000 <= p50 <= FINE[40] * 1000


def test_times_between_chunks_have_their_own_bounds():
    track = Track()
    gaps = [0] * (len(BETWEEN_CHUNKS) + 1)
    track.sample(START, WorkerTotals(gaps=gaps.copy()), 0)
    gaps[2] = 8
    track.sample(START + 5, WorkerTotals(gaps=gaps), 0)
    assert 25 <= track.read(900, "between_p95_ms", START + 5)[-1] <= 50


def test_the_cache_hit_ratio_counts_only_prompts_that_report_it():
    track = Track()
    track.sample(START, WorkerTotals(), 0)
    track.sample(START + 5, WorkerTotals(prompt_tokens=200, cached_tokens=50, input_tokens=900), 0)
    assert track.read(900, "cache_hit_ratio", START + 5)[-1] == 0.25


def test_a_longer_range_has_the_sum_of_its_shorter_steps():
    track = Track()
    at = START - START % STEPS[3600]
    for second in range(0, 45, 5):
        track.sample(at + second, WorkerTotals(requests=second * 3), second)
    assert track.read(3600, "requests_per_sec", at + 40)[-3:] == [3, 3, 3]
    assert track.read(3600, "in_flight", at + 40)[-3:] == [7.5, 27.5, 40]


def test_a_step_without_a_sample_has_no_value():
    track = Track()
    track.sample(START, WorkerTotals(), 1)
    track.sample(START + 15, WorkerTotals(requests=30), 1)
    assert track.read(900, "requests_per_sec", START + 20)[-5:] == [None, None, None, 2, None]


def test_points_older_than_the_range_are_dropped():
    track = Track()
    track.sample(START, WorkerTotals(), 7)
    assert track.read(900, "in_flight", START + 895)[0] == 7
    assert track.read(900, "in_flight", START + 900) == NOTHING
    track.sample(START + 2000, WorkerTotals(), 1)
    assert track.read(900, "in_flight", START + 2000) == [*NOTHING[1:], 1]
    assert 7 in track.read(3600, "in_flight", START + 2000)


def test_a_clock_that_is_set_back_resets_the_track():
    track = Track()
    track.sample(START, WorkerTotals(), 7)
    track.sample(START - 500, WorkerTotals(), 3)
    assert track.read(900, "in_flight", START - 500) == [*NOTHING[1:], 3]


def test_requests_of_the_fleet_are_counted_by_second_and_its_tokens_by_worker():
    (worker,) = fleet_of(entry("a")).workers
    history = History()
    history.sample_worker(START, worker, WorkerTotals(), None)
    history.end_second(START, (4, 1, first_counts(at_3=4)), 9, 2)
    history.sample_worker(START + 1, worker, WorkerTotals(requests=4, output_tokens=80), None)
    at = START + 1
    assert history.fleet.read(900, "requests_per_sec", at)[-1] == 4
    assert history.fleet.read(900, "output_tokens_per_sec", at)[-1] == 80
    assert history.fleet.read(900, "waiting", at)[-1] == 2
    assert history.fleet.read(900, "in_flight", at)[-1] == 9


def test_the_last_minute_of_a_worker_is_the_mean_of_its_complete_points():
    (worker,) = fleet_of(entry("a")).workers
    history, at = History(), START
    assert set(history.minute_of(worker, at).values()) == {None}
    for count in range(40):
        at = START + 5 * count
        totals = WorkerTotals(output_tokens=count * 10 if count < 30 else 300 + (count - 30) * 50)
        history.sample_worker(at, worker, totals, None)
    # Of the last twelve complete points, eight have 10 tokens per second, and four have 2.
    assert history.minute_of(worker, at)["output_tokens_per_sec"] == pytest.approx(22 / 3, rel=1e-3)
    assert history.minute_of(worker, at)["waiting"] is None
    assert history.minute_of(worker, at + 3600)["output_tokens_per_sec"] is None


def test_the_number_of_workers_is_bounded_and_removed_ones_are_dropped():
    a, b, c = fleet_of(*map(entry, "abc")).workers
    history = History(max_workers=2)
    for worker in (a, b, c):
        history.sample_worker(START, worker, WorkerTotals(), None)
    assert set(history.workers) == {a, b}
    history.keep({b, c})
    history.sample_worker(START, c, WorkerTotals(), None)
    assert set(history.workers) == {b, c}


def test_the_tracks_of_all_workers_have_at_most_16_mib():
    totals = WorkerTotals(
        firsts=first_counts(), gaps=[0] * (len(BETWEEN_CHUNKS) + 1), prompt_tokens=1
    )
    tracemalloc.start()
    try:
        tracks = [Track() for _ in range(3)]
        for at in range(0, max(STEPS) + 1, 5):  # until all ranges are full
            for track in tracks:
                track.sample(START + at, totals, 1, 1)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / len(tracks) * MAX_WORKERS < 16 * 1024 * 1024


@given(
    st.sampled_from([START, 0.0]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 50)), max_size=30),
)
def test_a_track_equals_a_dict_of_all_steps(at, samples):
    track, model = Track(), {}
    for wait, in_flight in samples:
        at += wait
        track.sample(at, WorkerTotals(), in_flight)
        model.setdefault(at // 5, []).append(in_flight)
    newest = int(at // 5)
    expected = [
        float(f"{sum(values) / len(values):.4g}") if (values := model.get(slot)) else None
        for slot in range(newest - POINTS + 1, newest + 1)
    ]
    assert track.read(900, "in_flight", at) == pytest.approx(expected)
    assert start_of(900, at) == (newest - POINTS + 1) * 5
    ended = [value for value in expected[-61:-1] if value is not None]
    mean = pytest.approx(sum(ended) / len(ended), rel=1e-3) if ended else None
    assert track.mean(900, "in_flight", at, 60) == mean


def end_second(history, at, requests=0, in_flight=0, waiting=0):
    history.end_second(at, (requests, 0, first_counts()), in_flight, waiting)


def test_the_history_of_a_cluster_adds_the_figures_of_other_proxies():
    history = History()
    end_second(history, START, requests=1)
    history.follow_cluster(member=True)
    history.peers = (4, 2)
    end_second(history, START + 1, requests=3, in_flight=1, waiting=1)
    assert history.take_unsent().requests == 3
    assert history.take_unsent().requests == 0
    history.add_of_peer(START + 1, Bin(requests=6, errors=2, secs=9.0, in_flight=7, samples=3))
    at = START + 1
    both, own = history.cluster, history.fleet
    assert [track.read(900, "requests_per_sec", at)[-1] for track in (own, both)] == [2, 5]
    assert [track.read(900, "errors_per_sec", at)[-1] for track in (own, both)] == [0, 1]
    assert [track.read(900, "in_flight", at)[-1] for track in (own, both)] == [0.5, 2.5]
    assert [track.read(900, "waiting", at)[-1] for track in (own, both)] == [1, 3]
    history.follow_cluster(member=False)
    assert history.cluster is None


def test_without_a_cluster_nothing_is_kept_for_other_proxies():
    history = History()
    end_second(history, START, requests=3)
    history.add_of_peer(START, Bin(requests=6))
    assert history.take_unsent().requests == 0


ROUND_SECS = 5
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
        for step in range(TICKS):
            instruments.history_sampler.step(at + second + step / TICKS)
        instruments.end_second(at + second + 0.99)


def test_each_worker_is_sampled_once_in_five_seconds_even_if_steps_are_late(fleet, instruments):
    samples = []
    sampler = instruments.history_sampler
    sampler.history.sample_worker = lambda at, worker, *_: samples.append(
        (at // ROUND_SECS, worker)
    )
    at = START
    for number in range(200):
        sampler.step(at)
        at += 0.05 + number % 7 * 0.02
    points = {point for point, _ in samples[:-2]}
    assert len(points) > 3
    for point in points:
        assert [worker for sampled, worker in samples if sampled == point] == fleet.workers


def test_a_sample_has_the_counts_of_its_worker_and_the_fleet_has_their_sum(fleet, instruments):
    a, b = fleet.workers
    run(instruments, ROUND_SECS)
    for _ in range(10):
        instruments.metrics.record(whole(a, 0.2), a)
    exchange = ended(a)
    exchange.last_chunk = USAGE
    instruments.metrics.record(exchange, a)
    run(instruments, ROUND_SECS, START + ROUND_SECS)
    history, at = instruments.history, START + 2 * ROUND_SECS - 1

    def newest(track, name):
        return track.read(900, name, at)[-1]

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
    waiting = [
        instruments.history.workers[worker].read(900, "waiting", START + 4)[-1] for worker in (a, b)
    ]
    assert waiting == [3, None]


def test_removed_workers_are_dropped(fleet, instruments):
    run(instruments, ROUND_SECS)
    fleet.apply([], fleet.workers[0].registered_at)
    run(instruments, ROUND_SECS, START + ROUND_SECS)
    assert instruments.history.workers == {}
