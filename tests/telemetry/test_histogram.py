import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.telemetry.histogram import (
    COARSE,
    DURATION,
    FINE,
    FIRST_CHUNK,
    SHORT,
    Histogram,
    LateHistogram,
    quantile,
)

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
