"""The compiled and the pure build put a value in the same bucket."""

from bisect import bisect_left

from hypothesis import example, given
from hypothesis import strategies as st

from omni_proxy.telemetry.bucket_index import bucket_of
from omni_proxy.telemetry.histogram import FINE

SECS = st.floats(0, 1000)


@given(st.lists(SECS).map(sorted).map(tuple), SECS)
@example((), 0.0)
@example((1.0, 1.0), 1.0)
def test_the_bucket_is_that_of_the_first_bound_not_below_the_value(bounds, secs):
    assert bucket_of(bounds, secs) == bisect_left(bounds, secs)


def test_each_bound_is_in_its_own_bucket():
    assert [bucket_of(FINE, bound) for bound in FINE] == list(range(len(FINE)))
    assert bucket_of(FINE, float("inf")) == len(FINE)
