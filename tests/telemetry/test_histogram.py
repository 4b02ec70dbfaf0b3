import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.dataplane.exchange.request_trace import RequestTrace
from omni_proxy.telemetry.histogram import (
    COARSE,
    DURATION,
    FINE,
    FIRST,
    FIRST_CHUNK,
    SHORT,
    TOTAL,
    Exemplars,
    Histogram,
    LateHistogram,
    Noted,
    marked,
    quantile,
)
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow
from tests.fleet.entries import NOW, entry, fleet_of
from tests.telemetry.ends import ended, refused

SECS = st.floats(0, 3000, allow_nan=False)


def fine_histogram(values):
    histogram = Histogram(FINE)
    for value in values:
        histogram.observe(value)
    return histogram


@given(st.lists(SECS))
def test_a_bucket_counts_all_values_at_or_below_its_bound(values):
    histogram = Histogram(FIRST_CHUNK)
    for value in values:
        histogram.observe(value)
    *rows, last = histogram.buckets()
    assert rows == [
        (f"{bound:.10g}", sum(value <= bound for value in values)) for bound in FIRST_CHUNK
    ]
    assert last == ("+Inf", len(values))


@given(st.lists(SECS | st.sampled_from(FIRST_CHUNK)), st.sampled_from([FIRST_CHUNK, FINE, SHORT]))
def test_observe_all_counts_like_single_observations(values, bounds):
    one, many = Histogram(bounds), Histogram(bounds)
    for value in values:
        one.observe(value)
    half = values[: len(values) // 2]
    rest = values[len(half) :]
    many.observe_all(half)
    many.observe_all(rest)
    assert many.counts == one.counts
    assert many.sum == pytest.approx(one.sum)
    assert half == rest == []


@given(st.lists(st.one_of(SECS, st.sampled_from(["counts", "sum", "buckets", "sort in", "clear"]))))
def test_late_values_are_included_when_a_caller_reads(steps):
    histogram, plain = LateHistogram(FIRST_CHUNK), Histogram(FIRST_CHUNK)
    late = histogram.late
    for step in steps:
        match step:
            case "counts":
                assert histogram.counts == plain.counts
            case "sum":
                assert histogram.sum == pytest.approx(plain.sum)
            case "buckets":
                assert histogram.buckets() == plain.buckets()
            case "sort in":
                histogram.sort_in()
                assert late == []
            case "clear":
                histogram.clear()
                plain.clear()
            case secs:
                late.append(secs)
                plain.observe(secs)
    assert histogram.late is late


@given(st.lists(SECS | st.sampled_from(DURATION)))
def test_fine_buckets_can_be_mapped_to_coarse_ones(values):
    coarse, spread = Histogram(DURATION), Histogram(DURATION)
    for value in values:
        coarse.observe(value)
    for index, count in enumerate(fine_histogram(values).counts):
        spread.counts[COARSE[index]] += count
    assert spread.counts == coarse.counts


@given(st.lists(SECS))
def test_reporting_fewer_buckets_is_equal_to_counting_only_those(values):
    coarse = Histogram(FIRST_CHUNK)
    for value in values:
        coarse.observe(value)
    assert fine_histogram(values).buckets(FIRST_CHUNK) == coarse.buckets()


@given(st.lists(st.floats(0.001, 60), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_near_the_exact_one(values, share):
    ranked = sorted(values)
    exact = ranked[min(max(-(-len(ranked) * share // 1) - 1, 0), len(ranked) - 1).__int__()]
    estimate = quantile(fine_histogram(values).counts, share)
    assert estimate is not None
    assert exact / 1.2 <= estimate <= exact * 1.2


def test_an_empty_histogram_has_no_quantile():
    assert quantile(Histogram(FINE).counts, 0.5) is None


def test_a_quantile_above_all_bounds_is_the_last_bound():
    assert quantile(fine_histogram([5000.0]).counts, 0.5) == FINE[-1]


KEY = ("/v1/chat/completions", None)


def noted(trace_id, secs, at):
    return Noted(trace_id, secs, at)


def values_of(marks):
    return {le: (mark.labels["trace_id"], mark.value, mark.timestamp) for le, mark in marks.items()}


def test_each_bucket_has_the_newest_request_in_it_as_exemplar():
    exemplars = Exemplars()
    for trace, secs, at in [
        ("a", 0.011, 5.0),
        ("b", 0.012, 6.0),
        ("old", 0.012, 1.0),
        ("c", 999, 2),
    ]:
        exemplars.put(KEY, TOTAL, noted(trace, secs, at))
    marks = exemplars.marks([KEY], TOTAL)
    assert values_of(marks) == {"0.02": ("b", 0.012, 6.0), "+Inf": ("c", 999, 2)}
    assert exemplars.marks([KEY], FIRST) == {}


def test_a_value_at_a_bound_is_in_the_bucket_below_it():
    exemplars = Exemplars()
    exemplars.put(KEY, TOTAL, noted("a", DURATION[3], 1.0))
    assert list(exemplars.marks([KEY], TOTAL)) == [f"{DURATION[3]:.10g}"]


def test_of_several_series_the_newest_exemplar_is_used():
    exemplars, other = Exemplars(), ("/generate", None)
    exemplars.put(KEY, TOTAL, noted("a", 0.011, 5.0))
    exemplars.put(other, TOTAL, noted("b", 0.012, 4.0))
    assert values_of(exemplars.marks([KEY, other], TOTAL)) == {"0.02": ("a", 0.011, 5.0)}


def test_buckets_without_an_exemplar_are_unchanged():
    exemplars = Exemplars()
    exemplars.put(KEY, TOTAL, noted("a", 0.011, 5.0))
    marks = exemplars.marks([KEY], TOTAL)
    assert marked([("0.01", 1), ("0.02", 3)], marks) == [("0.01", 1), ("0.02", 3, marks["0.02"])]
    assert marked([("0.01", 1)], {}) == [("0.01", 1)]


def test_exemplars_have_both_times_and_are_removed_with_their_worker():
    fleet = fleet_of(entry("a"))
    meters, (worker,) = Metrics(fleet, RecentWindow()), fleet.workers
    trace = RequestTrace(b"4bf92f3577b34da6a3ce929d0e0e4736")
    meters.note_trace(ended(worker, trace=trace), worker)
    meters.note_trace(refused(trace=trace), None)
    meters.note_trace(ended(worker, trace=trace, route=None), worker)
    by_series = {(key[1], kind): exemplar for key, kind, exemplar in meters.exemplars.rows()}
    assert {key: round(exemplar.secs, 3) for key, exemplar in by_series.items()} == {
        (worker, TOTAL): 1.1, (worker, FIRST): 0.2, (None, TOTAL): 1.1,
    }  # fmt: skip
    assert {exemplar.trace_id for exemplar in by_series.values()} == {trace.trace_id.decode()}
    fleet.apply([], NOW)
    meters.drop_removed_workers()
    assert {key[1] for key, *_ in meters.exemplars.rows()} == {None}
