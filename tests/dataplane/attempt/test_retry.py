import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.dataplane.attempt.retry import (
    allowed_attempts,
    may_retry,
    pause_secs,
)

KNOWN = ("connect_failure", "reset_before_response")


@given(st.integers(0, 10))
def test_attempts_are_limited_and_there_is_always_one(configured):
    allowed = allowed_attempts(configured)
    attempts = 1
    while may_retry("connect_failure", attempts, allowed, KNOWN):
        attempts += 1
    assert attempts == max(1, configured)


@pytest.mark.parametrize("failure", ["timeout", "503", "broken_body", ""])
def test_only_configured_failures_are_retried(failure):
    assert not may_retry(failure, 1, 6, KNOWN)
    assert may_retry("reset_before_response", 1, 6, KNOWN)
    assert not may_retry("reset_before_response", 1, 6, ("connect_failure",))


@given(st.integers(0, 50), st.floats(0, 1, exclude_max=True))
def test_pauses_grow_from_50_ms_to_a_second(attempts, chance):
    secs = pause_secs(attempts, chance)
    assert 0.05 <= secs <= 1.0
    assert secs <= pause_secs(attempts + 1, chance)


def test_half_of_a_pause_is_random():
    assert [pause_secs(attempts, 0.0) for attempts in range(7)] == [
        0.05,
        0.05,
        0.1,
        0.2,
        0.4,
        0.5,
        0.5,
    ]
    assert pause_secs(4, 0.5) == pytest.approx(0.6)
