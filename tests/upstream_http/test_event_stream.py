import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.upstream_http.event_stream import (
    AnswerChunk,
    EventStreamError,
    EventStreamReader,
    TokenUsage,
    read_chunk,
)

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.sampled_from(
    [b"", b"", b"data: a", b"data:b", b"data", b"data:  c\xc3\xa9\xe2\x80\xa8d", b": keep-alive",
     b":", b"event: x", b"id: 1", b"retry: 5", b"database: no"]
)  # fmt: skip


def naive(raw):
    """The events of a stream that is read at once."""
    text = raw.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events = []
    *blocks, _ = text.split(b"\n\n")
    for block in blocks:
        data = [line[5:] for line in block.split(b"\n") if line == b"data" or line[:5] == b"data:"]
        if data:
            events.append(b"\n".join(line.removeprefix(b" ") for line in data))
    return events


@settings(max_examples=200, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(LINES, ENDS), max_size=12),
    st.lists(st.integers(0, 120), max_size=12),
)
def test_a_stream_has_the_same_events_however_it_is_split(marked, lines, cuts):
    raw = b"\xef\xbb\xbf" * marked + b"".join(line + end for line, end in lines)
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    stream = EventStreamReader()
    events = []
    for start, end in pairwise(places):
        events += stream.feed(raw[start:end])
    assert events == naive(raw)


def test_an_event_is_returned_with_the_byte_that_ends_it():
    stream = EventStreamReader()
    assert stream.feed(b"data: 1\r\n\r") == [b"1"]
    assert stream.feed(b"\ndata: 2\n") == []
    assert stream.feed(b"\n") == [b"2"]


def test_an_event_without_end_is_refused_and_comments_are_not_counted():
    stream = EventStreamReader(max_event_bytes=20)
    for _ in range(10):
        assert stream.feed(b": keep-alive\n") == []
    with pytest.raises(EventStreamError, match="more than 20 bytes"):
        stream.feed(b"data: " + b"x" * 20)


def chunk(**choice):
    return json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"[DONE]", AnswerChunk(finished=True)),
        (b"", AnswerChunk()),
        (b"{}", AnswerChunk()),
        (chunk(delta={"role": "assistant", "content": ""}), AnswerChunk()),
        (chunk(delta={"content": "hi"}), AnswerChunk("hi", True)),
        (chunk(delta={"reasoning_content": "hm"}), AnswerChunk("hm", True)),
        (chunk(delta={"tool_calls": [{"index": 0}]}), AnswerChunk("", True)),
        (chunk(text="a", finish_reason="stop"), AnswerChunk("a", True, True)),
        (chunk(delta={}, finish_reason="length"), AnswerChunk(finished=True)),
        (b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
         AnswerChunk(usage=TokenUsage(3, 2))),
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":2,'
         b'"prompt_tokens_details":{"cached_tokens":1}}}', AnswerChunk(usage=TokenUsage(3, 2, 1))),
        (b'{"usage":{"prompt_tokens":"x"}}', AnswerChunk()),
        (b'{"usage":{"prompt_tokens":-1,"completion_tokens":2}}', AnswerChunk()),
    ],
)  # fmt: skip
def test_an_openai_chunk_is_read(data, expected):
    assert read_chunk(data) == expected


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "not JSON"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        (b"[]", "no JSON object"),
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"error":"gone"}', "gone"),
    ],
)
def test_an_error_or_invalid_chunk_is_refused(data, reason):
    with pytest.raises(EventStreamError, match=reason):
        read_chunk(data)
