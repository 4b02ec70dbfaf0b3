from random import getrandbits

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.dataplane.exchange.request_trace import (
    DRAW_BITS,
    MAX_SPANS,
    UNSAMPLED,
    UNSAMPLED_LINE,
    RequestTrace,
    TraceParent,
    Tracing,
    format_traceparent,
    parse_traceparent,
    read_traceparent,
    trace_parts,
    traceparent_index,
    with_traceparent,
)
from omni_proxy.fleet.worker import Worker
from tests.fleet.entries import NOW, entry

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
A, B = Worker(entry("a"), NOW), Worker(entry("b"), NOW)


@pytest.mark.parametrize("sampling", [0.0, 1.0])
def test_the_clients_sampling_decision_overrides_the_rate(sampling):
    tracing = Tracing(sampling)
    trace = tracing.begin(TraceParent(TRACE, SPAN, True))
    assert (trace.trace_id, trace.parent_id, trace.sampled) == (TRACE, SPAN, True)
    assert tracing.begin(TraceParent(TRACE, SPAN, False)) is UNSAMPLED


def test_a_new_trace_is_sampled_at_the_configured_rate():
    assert Tracing(0.0).begin(None) is UNSAMPLED
    one, two = Tracing(1.0).begin(None), Tracing(1.0).begin(None)
    assert (len(one.trace_id), one.parent_id) == (32, b"")
    assert one.trace_id != two.trace_id


def test_each_attempt_has_its_own_span():
    trace = RequestTrace(TRACE, SPAN)
    first = parse_traceparent(trace.begin_attempt(A, 1.0))
    trace.end_attempt(A, 2.0, "503")
    second = parse_traceparent(trace.begin_attempt(B, 3.0))
    assert first.trace_id == second.trace_id == TRACE
    assert [span.span_id for span in trace.attempts] == [first.span_id, second.span_id]
    assert trace.span_id not in (first.span_id, second.span_id, SPAN)
    assert [(s.started_at, s.ended_at, s.error) for s in trace.attempts] == [
        (1.0, 2.0, "503"),
        (3.0, 0.0, ""),
    ]


def test_a_retry_on_the_same_worker_ends_the_first_span():
    trace = RequestTrace(TRACE)
    trace.begin_attempt(A, 1.0)
    trace.begin_attempt(A, 2.0)
    assert [(s.ended_at, s.error) for s in trace.attempts] == [(2.0, "stale_connection"), (0.0, "")]


def test_the_spans_of_one_request_are_bounded():
    trace = RequestTrace(TRACE)
    for number in range(MAX_SPANS + 9):
        value = trace.begin_attempt(A, float(number))
        trace.add_wait(0.0, 1.0)
    assert (len(trace.attempts), len(trace.waits)) == (MAX_SPANS, MAX_SPANS)
    assert parse_traceparent(value) == TraceParent(TRACE, trace.span_id, True)


LINES = b"POST / HTTP/1.1\r\n"


def begin_unsampled(parts, index):
    """Begin an unsampled trace as the fast path does."""
    if index < 0:
        parts.append(UNSAMPLED_LINE % getrandbits(DRAW_BITS))
    else:
        assert Tracing(0.0).begin_from_parts(parts, index) is None


def test_an_unsampled_request_has_the_flag_and_keeps_its_own_context():
    sent = UNSAMPLED.lines_for_attempt(LINES, A, 1.0)
    own = parse_traceparent(sent.removeprefix(LINES + b"traceparent: ").rstrip())
    assert own.sampled is False
    with_context = LINES + b"traceparent: 00-%b-%b-00\r\n" % (TRACE, SPAN)
    assert UNSAMPLED.lines_for_attempt(with_context, A, 1.0) == with_context
    assert UNSAMPLED.attempts == []


@pytest.mark.parametrize("trace", [RequestTrace(TRACE), UNSAMPLED], ids=["sampled", "unsampled"])
@pytest.mark.parametrize("value", [None, b"00-%b-%b-00" % (TRACE, SPAN), b"nonsense"])
def test_a_head_in_parts_gets_the_same_context_as_a_complete_head(trace, value):
    parts, index, whole = [LINES], -1, LINES
    if value is not None:
        parts, index = [LINES + b"traceparent: ", value, b"\r\n"], 1
        whole = b"%btraceparent: %b\r\n" % (LINES, value)
    if trace.sampled:
        trace_parts(trace, parts, index, A, 1.0)
    else:
        begin_unsampled(parts, index)

    def ids(lines):
        context = parse_traceparent(lines.partition(b"traceparent: ")[2].rstrip())
        return context.sampled, context.trace_id if context.sampled or value else None

    joined = b"".join(parts)
    expected = trace.lines_for_attempt(whole, A, 1.0)
    assert joined.count(b"traceparent") == expected.count(b"traceparent") == 1
    if value == b"nonsense" and not trace.sampled:  # both have new random ids
        assert ids(joined)[0] is ids(expected)[0] is False
    else:
        assert ids(joined) == ids(expected)


def test_unsampled_requests_have_different_trace_ids():
    heads = [[LINES] for _ in range(100)]
    for parts in heads:
        begin_unsampled(parts, -1)
    assert len({b"".join(parts) for parts in heads}) == 100


def test_beginning_a_sampled_trace_leaves_the_parts_unchanged():
    parts = [LINES + b"traceparent: ", b"00-%b-%b-01" % (TRACE, SPAN), b"\r\n"]
    unchanged = list(parts)
    trace = Tracing(0.0).begin_from_parts(parts, 1)
    assert (trace.sampled, trace.trace_id, parts) == (True, TRACE, unchanged)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\naccept: */*\r\n"


def hexadecimal(digits):
    return st.integers(1, 16**digits - 1).map(lambda number: b"%0*x" % (digits, number))


@given(hexadecimal(32), hexadecimal(16), st.booleans())
def test_a_written_context_can_be_read(trace_id, span_id, sampled):
    value = format_traceparent(trace_id, span_id, sampled=sampled)
    assert parse_traceparent(value) == TraceParent(trace_id, span_id, sampled)
    assert read_traceparent(with_traceparent(HEAD, value)) == parse_traceparent(value)


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_no_context(value):
    context = parse_traceparent(value)
    assert context is None or value.lower() == value


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00-%b-%b" % (TRACE, SPAN),
        b"00-%b-%b-01" % (TRACE.upper(), SPAN),
        b"00-%b-%b-01" % (b"0" * 32, SPAN),
        b"00-%b-%b-01" % (TRACE, b"0" * 16),
        b"ff-%b-%b-01" % (TRACE, SPAN),
        b"00-%b-%b-01-more" % (TRACE, SPAN),
        b"00-%b-%b-1" % (TRACE, SPAN),
    ],
)
def test_an_invalid_value_is_no_context(value):
    assert parse_traceparent(value) is None


def test_a_later_version_may_have_more_after_the_flags():
    assert parse_traceparent(b"cc-%b-%b-09-more" % (TRACE, SPAN)) == TraceParent(TRACE, SPAN, True)
    assert parse_traceparent(b"cc-%b-%b-08" % (TRACE, SPAN)) == TraceParent(TRACE, SPAN, False)


def test_the_value_replaces_the_clients():
    lines = HEAD + b"TraceParent: 00-other\r\nx-last: 1\r\n"
    written = with_traceparent(lines, b"00-new")
    assert written == HEAD + b"x-last: 1\r\ntraceparent: 00-new\r\n"


def test_the_index_of_the_value_counts_forwarded_parts():
    parts = [(b"POST / HTTP/1.1\r\ncontent-length: ", False), (b"\r\nx-a: ", True)]
    assert traceparent_index(parts) == -1
    assert traceparent_index([*parts, (b"\r\nTraceparent: ", True)]) == 3
    assert traceparent_index([(b"traceparent: ", True), *parts]) == 1
