"""How a policy's view of the load elsewhere follows it."""

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.cluster.smoothing import first_seen, smoothed

SHARE = 0.05


def after(looks, before, total):
    for _ in range(looks):
        before = smoothed(before, total, SHARE)
    return before


@given(st.floats(0, 100), st.integers(0, 100), st.floats(0.001, 5))
def test_it_lies_between_before_and_now(before, total, share):
    value = smoothed(before, total, share)
    assert min(before, total) <= value <= max(before, total)


@given(st.integers(0, 100), st.integers(0, 100))
def test_it_reaches_what_lasts_exactly(before, total):
    assert after(200, before, total) == total


def test_fluctuation_passes_slowly_and_a_burst_fast():
    assert smoothed(10.0, 13, SHARE) == 10.15
    assert smoothed(10.0, 30, SHARE) == 20.0
    assert smoothed(30.0, 0, SHARE) == 15.0


def test_one_request_where_none_was_is_seen_at_once():
    assert smoothed(0.0, 1, SHARE) > 0


def test_a_request_elsewhere_counts_from_the_moment_that_it_is_heard_of():
    assert 0 < first_seen(0.0, 1) < 1
    assert first_seen(3.0, 5) == 3.0
    assert first_seen(0.0, 0) == 0
