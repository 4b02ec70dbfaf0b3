import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.dataplane.tracing.trace_context import (
    TraceParent,
    format_traceparent,
    parse_traceparent,
    read_traceparent,
    traceparent_index,
    with_traceparent,
)

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
LINES = b"POST /v1/chat/completions HTTP/1.1\r\naccept: */*\r\n"


def hexadecimal(digits):
    return st.integers(1, 16**digits - 1).map(lambda number: b"%0*x" % (digits, number))


@given(hexadecimal(32), hexadecimal(16), st.booleans())
def test_what_is_written_is_read_again(trace_id, span_id, sampled):
    value = format_traceparent(trace_id, span_id, sampled=sampled)
    assert parse_traceparent(value) == TraceParent(trace_id, span_id, sampled)
    assert read_traceparent(with_traceparent(LINES, value)) == parse_traceparent(value)


@given(st.binary(max_size=80))
def test_any_other_bytes_are_no_context(value):
    found = parse_traceparent(value)
    assert found is None or value.lower() == value


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


def test_a_later_version_may_have_more_behind_the_flags():
    assert parse_traceparent(b"cc-%b-%b-09-more" % (TRACE, SPAN)) == TraceParent(TRACE, SPAN, True)
    assert parse_traceparent(b"cc-%b-%b-08" % (TRACE, SPAN)) == TraceParent(TRACE, SPAN, False)


def test_the_value_replaces_that_of_the_client():
    lines = LINES + b"TraceParent: 00-other\r\nx-last: 1\r\n"
    written = with_traceparent(lines, b"00-ours")
    assert written == LINES + b"x-last: 1\r\ntraceparent: 00-ours\r\n"


def test_the_place_of_the_value_counts_what_is_forwarded():
    parts = [(b"POST / HTTP/1.1\r\ncontent-length: ", False), (b"\r\nx-a: ", True)]
    assert traceparent_index(parts) == -1
    assert traceparent_index([*parts, (b"\r\nTraceparent: ", True)]) == 3
    assert traceparent_index([(b"traceparent: ", True), *parts]) == 1
