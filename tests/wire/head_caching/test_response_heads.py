import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.head_caching.response_heads import MAX_ENTRIES, NOT_CACHED, ResponseHeadCache
from omni_proxy.wire.response import UpstreamProtocolError, UpstreamResponse


def answer(length, status="200 OK", more=()):
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *more]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def read(head, *, to_head):
    found = UpstreamResponse()
    found.read_head(head, to_head=to_head)
    return found


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
def test_a_remembered_answer_reads_as_a_fresh_one(heads):
    templates = ResponseHeadCache()
    for length, status, more, to_head in [*heads, *heads, *heads]:
        head = answer(length, status, more)
        one, other = templates.read(head, to_head=to_head), read(head, to_head=to_head)
        for name in ("status", "keep_alive", "sse", "remaining", "whole", "framing", "excess"):
            assert getattr(one, name) == getattr(other, name), name
        assert sorted(one.lines.lower().split(b"\r\n")) == sorted(
            other.lines.lower().split(b"\r\n")
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
def test_what_is_usual_of_an_answer_agrees_with_what_is_read(heads):
    templates = ResponseHeadCache()
    for length, status, more, comes_last in [*heads, *heads, *heads]:
        head = answer(length, status, more)
        if comes_last:
            lines = head.split(b"\r\n")
            head = b"\r\n".join([lines[0], *sorted(lines[1:-2], reverse=True), b"", b""])
        try:
            found = read(head, to_head=False)
        except UpstreamProtocolError:
            continue
        usual = templates.usual(head[:-4])
        length = head.partition(usual.name)[2].partition(b"\r\n")[0]
        if length.isdigit() and head[:-4] == written(usual, length):
            assert agree(usual, found)
            plain = found.keep_alive and not found.sse and 200 <= found.status < 500
            assert usual.plain == plain
        templates.read(head, to_head=False)


def written(usual, length):
    return usual.before + usual.name + length + (b"\r\n" + usual.after if usual.after else b"")


_PADDED = re.compile(rb"(?<=content-length): 0+(?=\d)")


def agree(usual, found):
    both = usual.lines + b"content-length: %d\r\n" % found.remaining, found.lines
    assert (usual.status, usual.keep_alive, usual.sse) == (
        found.status, found.keep_alive, found.sse,
    )  # fmt: skip
    one, other = (sorted(_PADDED.sub(b": ", lines.lower()).split(b"\r\n")) for lines in both)
    return one == other


@pytest.mark.parametrize("more", [(), ("A: 1",)])
def test_what_was_read_twice_is_usual(more):
    templates = ResponseHeadCache()
    templates.read(answer(5, more=more), to_head=False)
    assert templates.usual(answer(5, more=more)[:-4]) is NOT_CACHED
    templates.read(answer(6, more=more), to_head=False)
    assert templates.usual(answer(77, more=more)[:-4]).status == 200
    assert templates.usual(answer(77, more=("B: 1",))[:-4]) is NOT_CACHED
    assert templates.usual(b"") is NOT_CACHED


def test_an_answer_with_two_lengths_is_garbage_from_memory_too():
    templates = ResponseHeadCache()
    for _ in range(2):
        templates.read(answer(5), to_head=False)
    with pytest.raises(UpstreamProtocolError):
        templates.read(answer(5, more=["Content-Length: 6"]), to_head=False)


def test_varying_heads_of_one_worker_evict_no_entry_of_another():
    templates = ResponseHeadCache()
    for _ in range(2):
        templates.read(answer(5), to_head=False)
    for n in range(2 * MAX_ENTRIES):
        templates.read(answer(5, more=[f"Date: {n}"]), to_head=False)
        templates.read(answer(5, more=[f"X-Request-Id: {n}"]), to_head=False)
    assert templates.usual(answer(77)[:-4]).status == 200
    assert len(templates._known) == 1


def test_no_more_answers_are_remembered_than_allowed():
    templates = ResponseHeadCache()
    for n in range(2 * (MAX_ENTRIES + 10)):
        templates.read(answer(5, more=[f"Date: {n // 2}"]), to_head=False)
    assert len(templates._known) == MAX_ENTRIES
    assert templates.usual(answer(5, more=[f"Date: {MAX_ENTRIES}"])[:-4]) is not NOT_CACHED
    assert templates.usual(answer(5, more=["Date: 0"])[:-4]) is NOT_CACHED
