import pytest

from omni_proxy.dataplane.attempt.outlier_reports import counts_as_failed


@pytest.mark.parametrize(
    ("retry_on", "counted"),
    [((), {502, 504}), (("429", "500", "503", "504"), {500, 502, 504})],
)
def test_statuses_that_count_against_the_worker(retry_on, counted):
    assert {status for status in range(200, 600) if counts_as_failed(status, retry_on)} == counted
