"""Outlier ejection alone; test_health_state.py tests it together with probes and thresholds."""

import pytest

from omni_proxy.fleet.outlier_ejection import OutlierEjection


def ejected() -> OutlierEjection:
    outlier = OutlierEjection()
    assert outlier.count_failure(1, over_threshold=False)
    return outlier


@pytest.mark.parametrize(
    ("limit", "over_threshold", "failures"), [(3, False, 3), (1, False, 1), (0, True, 1)]
)
def test_the_limit_or_the_threshold_ejects(limit, over_threshold, failures):
    outlier = OutlierEjection()
    results = [outlier.count_failure(limit, over_threshold=over_threshold) for _ in range(failures)]
    assert results == [False] * (failures - 1) + [True]
    assert outlier.breaker_tripped


def test_without_a_limit_no_number_of_failed_requests_ejects():
    outlier = OutlierEjection()
    assert not any(outlier.count_failure(0, over_threshold=False) for _ in range(100))
    assert outlier.failed_requests == 100


def test_a_success_restarts_the_count():
    outlier = OutlierEjection()
    outlier.count_failure(2, over_threshold=False)
    assert not outlier.count_success()  # nothing was ejected
    assert not outlier.count_failure(2, over_threshold=False)


def test_while_ejected_only_the_half_open_request_counts():
    outlier = ejected()
    assert not outlier.is_evidence(0)
    number = outlier.begin_half_open()
    assert outlier.is_evidence(number)
    assert not outlier.is_evidence(0)
    assert not outlier.is_evidence(number + 1)


def test_the_half_open_request_closes_the_breaker_or_ejects_again():
    outlier = ejected()
    outlier.begin_half_open()
    assert outlier.count_failure(100, over_threshold=False)
    assert outlier.breaker_tripped
    outlier.begin_half_open()
    assert outlier.count_success()
    assert not outlier.breaker_tripped
    assert outlier.is_evidence(0)
    assert (outlier.failed_requests, outlier.half_open_id) == (0, 0)


def test_a_half_open_request_without_a_result_ends_once():
    outlier = ejected()
    number = outlier.begin_half_open()
    assert outlier.end_half_open(number)
    assert outlier.breaker_tripped
    assert not outlier.end_half_open(number)
    assert outlier.begin_half_open() == number + 1
