import pytest

from omni_proxy.cli.bench.measurements import LoadMeasurements, RequestTimes
from omni_proxy.upstream_http.event_stream import AnswerChunk, TokenUsage


def answered(sent_at, arrivals, ended_at, usage=None):
    times = RequestTimes(sent_at)
    times.add(AnswerChunk(), sent_at + 0.001)  # the role, which is no token
    for at in arrivals:
        times.add(AnswerChunk("x", True), at)
    times.add(AnswerChunk(finished=True, usage=usage), ended_at)
    times.ended_at = ended_at
    return times


@pytest.fixture
def measured():
    return LoadMeasurements(started_at=100.0)


def test_times_are_those_of_the_events_with_something_generated(measured):
    measured.begin(0.0)
    measured.complete(answered(100.0, [100.5, 100.6, 101.0], 101.5, TokenUsage(7, 6, 4)))
    found = measured.figures(None)
    assert found.first_token_ms["p50"] == 500
    assert found.between_events_ms == {"mean": 250, "p50": 100, "p90": 400, "p99": 400}
    assert found.between_tokens_ms["p50"] == 100  # 500 ms for the five tokens after the first
    assert found.total_ms["p99"] == 1500
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (7, 6, 4)
    assert found.duration_secs == 1.5
    assert found.output_tokens_per_sec == 4
    assert found.goodput is None


def test_a_failed_request_lowers_the_goodput_and_adds_no_time(measured):
    for _ in range(4):
        measured.begin(0.0)
    measured.complete(answered(100.0, [100.1], 101.0))
    measured.complete(answered(100.0, [100.3], 102.0))
    measured.fail("status 503", "busy", 104.0)
    measured.fail("status 503", "busy again", 103.0)
    found = measured.figures(deadline_ms=200)
    assert (found.requests, found.completed, found.failed) == (4, 2, 2)
    assert (found.errors, found.error_examples) == ({"status 503": 2}, {"status 503": "busy"})
    assert (found.goodput.share, found.goodput.requests_per_sec) == (0.25, 0.25)
    assert found.total_ms["p99"] == 2000
    assert found.without_usage == 2
    assert found.cached_tokens is None


def test_an_interrupted_run_lasts_until_then_and_counts_what_is_in_flight(measured):
    measured.begin(0.0)
    measured.begin(0.25)
    measured.complete(answered(100.0, [100.5], 101.0, TokenUsage(10, 1)))
    found = measured.figures(None, interrupted_at=105.0)
    assert (found.requests, found.unfinished, found.duration_secs) == (1, 1, 5)
    assert found.input_tokens_per_sec == 2
    assert found.between_tokens_ms is None  # one token has none after it
    assert found.sent_late_ms["p99"] == 250


def test_nothing_measured_has_no_spreads_and_no_rates(measured):
    found = measured.figures(deadline_ms=1, interrupted_at=100.0)
    assert (found.requests, found.requests_per_sec, found.goodput.share) == (0, 0, 0)
    assert found.first_token_ms is found.total_ms is found.sent_late_ms is None
