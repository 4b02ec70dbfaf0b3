import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.dataplane.request_trace import RequestTrace
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


def fine(values):
    held = Histogram(FINE)
    for value in values:
        held.observe(value)
    return held


@given(st.lists(SECS))
def test_a_bucket_holds_all_that_lies_at_or_below_its_bound(values):
    held = Histogram(FIRST_CHUNK)
    for value in values:
        held.observe(value)
    *rows, last = held.buckets()
    assert rows == [
        (f"{bound:.10g}", sum(value <= bound for value in values)) for bound in FIRST_CHUNK
    ]
    assert last == ("+Inf", len(values))


@given(st.lists(SECS | st.sampled_from(FIRST_CHUNK)), st.sampled_from([FIRST_CHUNK, FINE, SHORT]))
def test_many_at_once_are_counted_as_each_of_them(values, bounds):
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
def test_what_waits_is_there_for_a_caller_that_reads(steps):
    held, plain = LateHistogram(FIRST_CHUNK), Histogram(FIRST_CHUNK)
    late = held.late
    for step in steps:
        match step:
            case "counts":
                assert held.counts == plain.counts
            case "sum":
                assert held.sum == pytest.approx(plain.sum)
            case "buckets":
                assert held.buckets() == plain.buckets()
            case "sort in":
                held.sort_in()
                assert late == []
            case "clear":
                held.clear()
                plain.clear()
            case secs:
                late.append(secs)
                plain.observe(secs)
    assert held.late is late


@given(st.lists(SECS | st.sampled_from(DURATION)))
def test_what_is_counted_finely_can_be_reported_coarsely(values):
    coarse, spread = Histogram(DURATION), Histogram(DURATION)
    for value in values:
        coarse.observe(value)
    for place, count in enumerate(fine(values).counts):
        spread.counts[COARSE[place]] += count
    assert spread.counts == coarse.counts


@given(st.lists(SECS))
def test_fewer_buckets_are_reported_as_if_only_those_had_been_counted(values):
    coarse = Histogram(FIRST_CHUNK)
    for value in values:
        coarse.observe(value)
    assert fine(values).buckets(FIRST_CHUNK) == coarse.buckets()


@given(st.lists(st.floats(0.001, 60), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_near_the_real_one(values, share):
    ranked = sorted(values)
    real = ranked[min(max(-(-len(ranked) * share // 1) - 1, 0), len(ranked) - 1).__int__()]
    reported = quantile(fine(values).counts, share)
    assert reported is not None
    assert real / 1.2 <= reported <= real * 1.2


def test_of_nothing_there_is_no_quantile():
    assert quantile(Histogram(FINE).counts, 0.5) is None


def test_what_lies_above_all_bounds_is_reported_as_the_last():
    assert quantile(fine([5000.0]).counts, 0.5) == FINE[-1]


KEY = ("/v1/chat/completions", None)


def noted(trace_id, secs, at):
    return Noted(trace_id, secs, at)


def shown(marks):
    return {le: (mark.labels["trace_id"], mark.value, mark.timestamp) for le, mark in marks.items()}


def test_each_bucket_has_the_newest_request_that_fell_there():
    exemplars = Exemplars()
    for trace, secs, at in [
        ("a", 0.011, 5.0),
        ("b", 0.012, 6.0),
        ("old", 0.012, 1.0),
        ("c", 999, 2),
    ]:
        exemplars.put(KEY, TOTAL, noted(trace, secs, at))
    marks = exemplars.marks([KEY], TOTAL)
    assert shown(marks) == {"0.02": ("b", 0.012, 6.0), "+Inf": ("c", 999, 2)}
    assert exemplars.marks([KEY], FIRST) == {}


def test_a_value_at_a_bound_is_in_the_bucket_below_it():
    exemplars = Exemplars()
    exemplars.put(KEY, TOTAL, noted("a", DURATION[3], 1.0))
    assert list(exemplars.marks([KEY], TOTAL)) == [f"{DURATION[3]:.10g}"]


def test_of_several_series_the_newest_counts():
    exemplars, other = Exemplars(), ("/generate", None)
    exemplars.put(KEY, TOTAL, noted("a", 0.011, 5.0))
    exemplars.put(other, TOTAL, noted("b", 0.012, 4.0))
    assert shown(exemplars.marks([KEY, other], TOTAL)) == {"0.02": ("a", 0.011, 5.0)}


def test_buckets_without_an_exemplar_stay_as_they_are():
    exemplars = Exemplars()
    exemplars.put(KEY, TOTAL, noted("a", 0.011, 5.0))
    marks = exemplars.marks([KEY], TOTAL)
    assert marked([("0.01", 1), ("0.02", 3)], marks) == [("0.01", 1), ("0.02", 3, marks["0.02"])]
    assert marked([("0.01", 1)], {}) == [("0.01", 1)]


def test_a_request_is_noted_with_both_its_times_and_leaves_with_its_worker():
    fleet = fleet_of(entry("a"))
    meters, (worker,) = Metrics(fleet, RecentWindow()), fleet.workers
    trace = RequestTrace(b"4bf92f3577b34da6a3ce929d0e0e4736")
    meters.note_trace(ended(worker, trace=trace), worker)
    meters.note_trace(refused(trace=trace), None)
    meters.note_trace(ended(worker, trace=trace, route=None), worker)
    found = {(key[1], kind): each for key, kind, each in meters.exemplars.rows()}
    assert {key: round(each.secs, 3) for key, each in found.items()} == {
        (worker, TOTAL): 1.1, (worker, FIRST): 0.2, (None, TOTAL): 1.1,
    }  # fmt: skip
    assert {each.trace_id for each in found.values()} == {trace.trace_id.decode()}
    fleet.apply([], NOW)
    meters.drop_removed_workers()
    assert {key[1] for key, *_ in meters.exemplars.rows()} == {None}
