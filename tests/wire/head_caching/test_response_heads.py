import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.head_caching.response_heads import MAX_ENTRIES, NOT_CACHED, ResponseHeadCache
from omni_proxy.wire.response import UpstreamProtocolError, UpstreamResponse


def response_head(length, status="200 OK", more=()):
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *more]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def read(head, *, to_head):
    parsed = UpstreamResponse()
    parsed.read_head(head, to_head=to_head)
    return parsed


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, 0, 7, 350]),
            st.sampled_from(["200 OK", "204 No Content", "304 Same", "503 Busy", "100 Continue"]),
            st.lists(st.sampled_from(["Connection: close", "Date: now", "A: 1"]), max_size=2),
            st.booleans(),
        ),
        max_size=8,
    )
)  # fmt: skip
def test_cached_heads_equal_parsed_ones(heads):
    cache = ResponseHeadCache()
    for length, status, more, to_head in [*heads, *heads, *heads]:
        head = response_head(length, status, more)
        cached, parsed = cache.read(head, to_head=to_head), read(head, to_head=to_head)
        for name in (
            "status",
            "keep_alive",
            "sse",
            "remaining",
            "is_complete",
            "framing",
            "excess",
        ):
            assert getattr(cached, name) == getattr(parsed, name), name
        assert sorted(cached.lines.lower().split(b"\r\n")) == sorted(
            parsed.lines.lower().split(b"\r\n")
        )


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, 0, 7, 350, "007", "x", "9" * 16]),
            st.sampled_from(["200 OK", "204 No Content", "304 Same", "503 Busy", "100 Continue"]),
            st.lists(
                st.sampled_from(
                    ["Connection: close", "Content-Type: text/event-stream", "A: 1",
                     "content-length: 3", "Transfer-Encoding: chunked"]
                ),
                max_size=2,
            ),
            st.booleans(),
        ),
        max_size=8,
    )
)  # fmt: skip
def test_the_cached_parts_of_a_head_agree_with_the_parsed_head(heads):
    cache = ResponseHeadCache()
    for length, status, more, reordered in [*heads, *heads, *heads]:
        head = response_head(length, status, more)
        if reordered:
            lines = head.split(b"\r\n")
            head = b"\r\n".join([lines[0], *sorted(lines[1:-2], reverse=True), b"", b""])
        try:
            parsed = read(head, to_head=False)
        except UpstreamProtocolError:
            continue
        cached = cache.find(head[:-4])
        length = head[len(cached.start) :].partition(b"\r\n")[0]
        if length.isdigit() and head[:-4] == cached.start + length + cached.end:
            assert agree(cached, parsed)
            plain = parsed.keep_alive and not parsed.sse and 200 <= parsed.status < 500
            assert cached.plain == plain
        cache.read(head, to_head=False)


_PADDED = re.compile(rb"(?<=content-length): 0+(?=\d)")


def agree(cached, parsed):
    both = cached.lines + b"content-length: %d\r\n" % parsed.remaining, parsed.lines
    assert (cached.status, cached.keep_alive, cached.sse) == (
        parsed.status, parsed.keep_alive, parsed.sse,
    )  # fmt: skip
    cached_lines, parsed_lines = (
        sorted(_PADDED.sub(b": ", lines.lower()).split(b"\r\n")) for lines in both
    )
    return cached_lines == parsed_lines


@pytest.mark.parametrize("more", [(), ("A: 1",)])
def test_a_head_that_was_read_twice_is_cached(more):
    cache = ResponseHeadCache()
    cache.read(response_head(5, more=more), to_head=False)
    assert cache.find(response_head(5, more=more)[:-4]) is NOT_CACHED
    cache.read(response_head(6, more=more), to_head=False)
    assert cache.find(response_head(77, more=more)[:-4]).status == 200
    assert cache.find(response_head(77, more=("B: 1",))[:-4]) is NOT_CACHED
    assert cache.find(b"") is NOT_CACHED


def test_a_second_content_length_is_an_error_with_a_warm_cache():
    cache = ResponseHeadCache()
    for _ in range(2):
        cache.read(response_head(5), to_head=False)
    with pytest.raises(UpstreamProtocolError):
        cache.read(response_head(5, more=["Content-Length: 6"]), to_head=False)


def test_varying_heads_do_not_evict_a_used_entry():
    cache = ResponseHeadCache()
    for _ in range(2):
        cache.read(response_head(5), to_head=False)
    for n in range(2 * MAX_ENTRIES):
        cache.read(response_head(5, more=[f"Date: {n}"]), to_head=False)
        cache.read(response_head(5, more=[f"X-Request-Id: {n}"]), to_head=False)
    assert cache.find(response_head(77)[:-4]).status == 200
    assert cache.size == 1


def test_the_number_of_entries_is_bounded():
    cache = ResponseHeadCache()
    for n in range(2 * (MAX_ENTRIES + 10)):
        cache.read(response_head(5, more=[f"Date: {n // 2}"]), to_head=False)
    assert cache.size == MAX_ENTRIES
    assert cache.find(response_head(5, more=[f"Date: {MAX_ENTRIES}"])[:-4]) is not NOT_CACHED
    assert cache.find(response_head(5, more=["Date: 0"])[:-4]) is NOT_CACHED
