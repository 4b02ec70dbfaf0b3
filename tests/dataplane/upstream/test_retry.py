import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.dataplane.upstream.retry import (
    allowed_attempts,
    counts_as_failed,
    may_retry,
    pause_secs,
)

KNOWN = ("connect_failure", "reset_before_response")


@given(st.integers(0, 10))
def test_tries_are_counted_in_all_and_there_is_always_one(configured):
    allowed = allowed_attempts(configured)
    made = 1
    while may_retry("connect_failure", made, allowed, KNOWN):
        made += 1
    assert made == max(1, configured)


@pytest.mark.parametrize("failure", ["timeout", "503", "broken_body", ""])
def test_only_what_is_named_is_retried(failure):
    assert not may_retry(failure, 1, 6, KNOWN)
    assert may_retry("reset_before_response", 1, 6, KNOWN)
    assert not may_retry("reset_before_response", 1, 6, ("connect_failure",))


@given(st.integers(0, 50), st.floats(0, 1, exclude_max=True))
def test_pauses_grow_from_50_ms_to_a_second(made, chance):
    secs = pause_secs(made, chance)
    assert 0.05 <= secs <= 1.0
    assert secs <= pause_secs(made + 1, chance)


def test_half_of_a_pause_is_chance():
    assert [pause_secs(made, 0.0) for made in range(7)] == [0.05, 0.05, 0.1, 0.2, 0.4, 0.5, 0.5]
    assert pause_secs(4, 0.5) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("retry_on", "counted"),
    [((), {502, 504}), (("429", "500", "503", "504"), {500, 502, 504})],
)
def test_which_statuses_count_against_their_worker(retry_on, counted):
    assert {status for status in range(200, 600) if counts_as_failed(status, retry_on)} == counted
