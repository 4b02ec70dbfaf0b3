import pytest

from omni_proxy.shared.backoff import Backoff, exponential_delay


def test_the_delay_doubles_up_to_its_limit():
    backoff = Backoff(1.0, 30.0)
    assert [backoff.next_delay() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_long_run_resets_the_delay():
    backoff = Backoff(1.0, 30.0, reset_after_secs=60.0)
    assert [backoff.next_delay(secs) for secs in (0, 59, 60, 0)] == [1, 2, 1, 2]


def test_a_reset_starts_from_the_first_delay():
    backoff = Backoff(1.0, 30.0)
    backoff.next_delay()
    backoff.reset()
    assert backoff.next_delay() == 1


@pytest.mark.parametrize("failures", [0, 5, 1000, 10**6])
def test_any_number_of_failures_gives_a_finite_delay(failures):
    assert 0.05 <= exponential_delay(failures, 0.05, 1.0) <= 1.0
