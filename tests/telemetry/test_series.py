"""Responses in one piece are counted on a faster path, with the same results."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.histogram import DURATION, FINE, SHORT, Histogram
from omni_proxy.telemetry.metrics import OTHER, Metrics
from omni_proxy.telemetry.recent_window import TEXT_CHARS, RecentWindow
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import CHAT, whole

PATH = CHAT.path
SECS = st.sampled_from([0.0001, 0.01, 0.16, 0.2, 5.0, 2000.0])
MODELS = st.sampled_from(["m", "n", None, "x", "y" * (TEXT_CHARS + 1)])
SLOW_PATH_FIELDS: list[dict[str, object]] = [
    {"status": 206},
    {"status": 404},
    {"chunks": 2},
    {"attempts": 2},
    {"outcome": "upstream_error", "ended_by": "worker"},
    {"sent_at": 100.00005},
    {"response_head_at": 100.00005},
    {"last_chunk": b'{"usage":{"prompt_tokens":3}}'},
    {"ended_at": 3000.0},
    {"first_at": 0.0, "chunks": 0},
]
FIELDS = st.fixed_dictionaries({"secs": SECS, "model": MODELS})
VARIATIONS = st.sampled_from([{}, {}, {}, *SLOW_PATH_FIELDS])
READS = st.sampled_from(["series", "phases", "of", "tick"])
STEPS = st.lists(st.tuples(st.integers(0, 1), FIELDS, VARIATIONS) | READS)


class NaiveMetrics:
    """Counts every exchange directly."""

    def __init__(self) -> None:
        self.ends: Counter[tuple[Worker, object]] = Counter()
        self.sums: Counter[tuple[Worker, str]] = Counter()
        self.times: dict[object, Histogram] = {}
        self.head = Histogram(FINE)
        self.overheads = 0

    def count(self, exchange, worker) -> None:
        model = exchange.requirements.model
        label = model if model in (None, "m", "n") else OTHER
        self.ends[worker, (label, exchange.status // 100, exchange.outcome)] += 1
        for name in ("bytes_in", "bytes_out", "chunks"):
            self.sums[worker, name] += getattr(exchange, name)
        self.times_of(worker, "total").observe(exchange.ended_at - exchange.started_at)
        if exchange.first_at:
            self.times_of(worker, "first").observe(exchange.first_at - exchange.started_at)
            self.times_of(worker, "recent").observe(exchange.first_at - exchange.sent_at)
        self.head.observe(exchange.response_head_at - exchange.sent_at)
        self.overheads += 1

    def times_of(self, worker, name) -> Histogram:
        bounds = DURATION if name == "total" else FINE
        return self.times.setdefault((worker, name), Histogram(bounds))


def assert_equal(actual: Histogram, expected: Histogram) -> None:
    assert actual.counts == expected.counts
    assert actual.sum == pytest.approx(expected.sum)


def read_metrics(name, meters, recent, worker) -> None:
    match name:
        case "of":
            recent.worker_window(worker, 1000.0)
        case "tick":
            recent.tick(1000.0, 0, 0)
        case _:
            getattr(meters, name)


@given(STEPS, st.integers(1, 5))
def test_every_read_includes_all_ended_exchanges(steps, at_once):
    fleet, recent, naive = (
        fleet_of(entry("a", model="m"), entry("b", model="n")),
        RecentWindow(),
        NaiveMetrics(),
    )
    meters = Metrics(fleet, recent, at_once=at_once)
    for step in steps:
        if isinstance(step, str):
            read_metrics(step, meters, recent, fleet.workers[0])
            continue
        index, fields, variation = step
        exchange = whole(**(fields | variation))
        meters.record(exchange, fleet.workers[index])
        naive.count(exchange, fleet.workers[index])
    cells = meters.series
    assert {w: sum(c.ends.values()) for (_, w), c in cells.items()} == dict(totals(naive.ends))
    for (_, worker), cell in cells.items():
        assert {(worker, end): n for end, n in cell.ends.items()}.items() <= naive.ends.items()
        for name in ("bytes_in", "bytes_out", "chunks"):
            assert getattr(cell, name) == naive.sums[worker, name]
        assert_equal(cell.total, naive.times_of(worker, "total"))
        assert_equal(cell.first, naive.times_of(worker, "first"))
        assert recent.sums[worker].firsts == naive.times_of(worker, "recent").counts
        assert recent.sums[worker].requests == sum(cell.ends.values())
    if cells:
        assert_equal(meters.phases[PATH].head, naive.head)
        assert sum(meters.phases[PATH].overhead.counts) == naive.overheads


def totals(ends: Counter[tuple[Worker, object]]) -> Counter[Worker]:
    by_worker: Counter[Worker] = Counter()
    for (worker, _), count in ends.items():
        by_worker[worker] += count
    return by_worker


def test_a_model_has_its_own_label_once_a_worker_has_it():
    fleet = fleet_of(entry("a", model="m"))
    (a,) = fleet.workers
    meters = Metrics(fleet, RecentWindow())
    for _ in range(2):
        meters.record(whole(model="new"), a)
    fleet.apply([entry("a", model="new")], NOW)
    for _ in range(3):
        meters.record(whole(model="new"), a)
    meters.record(whole(model="m"), a)
    ends = {(OTHER, 2, "completed"): 3, ("new", 2, "completed"): 3}
    assert meters.series[PATH, a].ends == ends


def test_a_long_model_name_is_not_kept():
    fleet = fleet_of(entry("a"))
    (a,) = fleet.workers
    meters = Metrics(fleet, RecentWindow())
    for name in ("x", "y" * 100_000, "x"):
        meters.record(whole(model=name), a)
    cell = meters.series[PATH, a]
    assert cell.ends == {(OTHER, 2, "completed"): 3}
    assert cell.model_key == "x"


def test_the_number_of_unsorted_times_is_bounded():
    fleet = fleet_of(entry("a"))
    (a,) = fleet.workers
    meters = Metrics(fleet, RecentWindow(), at_once=10)
    for number in range(25):
        fields = {"response_head_at": 100.1} if number % 2 else {"sent_at": 100.05}
        meters.record(whole(**fields), a)
        waiting = meters.phases_for(PATH)
        assert len(waiting.own) + len(waiting.heads) < 20
    assert sum(meters.phases[PATH].overhead.counts) == 25
    assert sum(meters.phases[PATH].head.counts) == 25
    assert len(meters.phases[PATH].overhead.counts) == len(SHORT) + 1
