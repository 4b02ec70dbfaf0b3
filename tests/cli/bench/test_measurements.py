import pytest

from omni_proxy.cli.bench.measurements import LoadMeasurements, RequestTimes
from omni_proxy.upstream_http.event_stream import AnswerChunk, TokenUsage


def times_of(sent_at, arrivals, ended_at, usage=None):
    times = RequestTimes(sent_at)
    times.add(AnswerChunk(), sent_at + 0.001)  # the role; it has no token
    for arrived_at in arrivals:
        times.add(AnswerChunk("x", True), arrived_at)
    times.add(AnswerChunk(finished=True, usage=usage), ended_at)
    times.ended_at = ended_at
    return times


@pytest.fixture
def measurements():
    return LoadMeasurements(started_at=100.0)


def test_times_are_measured_at_events_with_generated_text(measurements):
    measurements.begin(0.0)
    measurements.complete(times_of(100.0, [100.5, 100.6, 101.0], 101.5, TokenUsage(7, 6, 4)))
    figures = measurements.figures(None)
    assert figures.first_token_ms["p50"] == 500
    assert figures.between_events_ms == {"mean": 250, "p50": 100, "p90": 400, "p99": 400}
    assert figures.between_tokens_ms["p50"] == 100  # 500 ms for the five tokens after the first
    assert figures.total_ms["p99"] == 1500
    assert (figures.input_tokens, figures.output_tokens, figures.cached_tokens) == (7, 6, 4)
    assert figures.duration_secs == 1.5
    assert figures.output_tokens_per_sec == 4
    assert figures.goodput is None


def test_a_failed_request_lowers_the_goodput_and_adds_no_time(measurements):
    for _ in range(4):
        measurements.begin(0.0)
    measurements.complete(times_of(100.0, [100.1], 101.0))
    measurements.complete(times_of(100.0, [100.3], 102.0))
    measurements.fail("status 503", "busy", 104.0)
    measurements.fail("status 503", "busy again", 103.0)
    figures = measurements.figures(deadline_ms=200)
    assert (figures.requests, figures.completed, figures.failed) == (4, 2, 2)
    assert (figures.errors, figures.error_examples) == ({"status 503": 2}, {"status 503": "busy"})
    assert (figures.goodput.share, figures.goodput.requests_per_sec) == (0.25, 0.25)
    assert figures.total_ms["p99"] == 2000
    assert figures.without_usage == 2
    assert figures.cached_tokens is None


def test_an_interrupted_run_ends_at_the_interrupt_and_counts_unfinished_requests(measurements):
    measurements.begin(0.0)
    measurements.begin(0.25)
    measurements.complete(times_of(100.0, [100.5], 101.0, TokenUsage(10, 1)))
    figures = measurements.figures(None, interrupted_at=105.0)
    assert (figures.requests, figures.unfinished, figures.duration_secs) == (1, 1, 5)
    assert figures.input_tokens_per_sec == 2
    assert figures.between_tokens_ms is None  # there is no token after the first
    assert figures.sent_late_ms["p99"] == 250


def test_without_requests_there_are_no_percentiles_and_rates_are_0(measurements):
    figures = measurements.figures(deadline_ms=1, interrupted_at=100.0)
    assert (figures.requests, figures.requests_per_sec, figures.goodput.share) == (0, 0, 0)
    assert figures.first_token_ms is figures.total_ms is figures.sent_late_ms is None
