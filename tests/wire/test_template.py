import re

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from omni_proxy.wire.answer import Answer, UpstreamGarbage
from omni_proxy.wire.errors import Refusal
from omni_proxy.wire.head import RequestHead, judge
from omni_proxy.wire.template import NO_ANSWER, TEMPLATES, AnswerTemplates, RequestTemplates

NAMES = st.sampled_from(
    ["Content-Length", "content-length", "X-Request-Id", "traceparent", "Transfer-Encoding", "Host",
     "Connection", "X-Correlation-Id", "x-sglang-omni-request-id", "Accept", "Expect",
     "X-Omni-Weight-Version", "x-omni-min-weight-epoch"]
)  # fmt: skip
VALUES = st.sampled_from(
    [
        "0",
        "12",
        "+5",
        "1e3",
        "abc",
        "chunked",
        "h",
        "close",
        "x-request-id",
        "a b",
        "100-continue",
        "é",
    ]
)
# How a head is written is remembered beside what it says.
KEPT = [name for name in RequestHead.__slots__ if name not in ("lines", "spelling")]
FIELDS = st.lists(st.tuples(NAMES, st.sampled_from([": ", ":", ":  "]), VALUES), max_size=6)


def request(fields, start="POST /v1/chat/completions HTTP/1.1"):
    lines = [start, "Host: h", *(f"{name}{colon}{value}" for name, colon, value in fields)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def verdict(read, head):
    try:
        found = read(head)
    except Refusal as refusal:
        return refusal.status, refusal.message
    lines = sorted(line.replace(b": ", b":") for line in found.lines.split(b"\r\n"))
    return lines, [getattr(found, name) for name in KEPT]


@given(st.lists(FIELDS, min_size=1, max_size=8))
def test_a_remembered_head_reads_as_the_judge_reads_it(heads):
    templates = RequestTemplates()
    for fields in [*heads, *heads]:
        head = request(fields)
        assert verdict(templates.judge, head) == verdict(judge, head)


def test_the_second_head_is_answered_from_memory():
    templates = RequestTemplates()
    first = templates.judge(request([("Content-Length", ": ", "5"), ("X-Request-Id", ": ", "a")]))
    second = templates.judge(request([("Content-Length", ": ", "77"), ("X-Request-Id", ": ", "b")]))
    assert (first.length, first.request_id) == (5, b"a")
    assert (second.length, second.request_id) == (77, b"b")
    assert second.lines.endswith(b"X-Request-Id: b\r\n")
    assert second.words is first.words or second.words == first.words


@pytest.mark.parametrize("value", ["+5", "5x", "0x5", "9" * 16])
def test_a_length_that_is_no_plain_number_is_refused_behind_a_remembered_head_too(value):
    templates = RequestTemplates()
    templates.judge(request([("Content-Length", ": ", "5")]))
    head = request([("Content-Length", ": ", value)])
    assert verdict(templates.judge, head) == verdict(judge, head)


def test_no_more_heads_are_remembered_than_allowed():
    templates = RequestTemplates()
    for number in range(TEMPLATES + 10):
        templates.judge(request([("Authorization", ": ", f"key {number}")]))
    assert len(templates._known) <= TEMPLATES


LENGTHS = re.compile(rb"\r\nContent-Length: ?(.*?)(?:\r\n|\Z)", re.IGNORECASE | re.DOTALL)
SPELT = ["Content-Length", "content-length", "X-Request-Id", "traceparent"]
# Of the same fields with other values, most of which some reader could take for more than a value.
OTHER_VALUES = VALUES | st.sampled_from(
    ["7", "", " ", "9\t", "1\r\nHost: x", "1\r\nContent-Length: 2", "1\r\n", "1\n", "a\0", "12, 12"]
)


def seen_twice(fields):
    """As read from memory; None where it is not remembered."""
    templates = RequestTemplates()
    try:
        templates.judge(request(fields))
        found = templates.judge(request(fields))
    except Refusal:
        return None
    return found if found.spelling is not None else None


def filled_in(head, second):
    """What `second`, a head without its blank line, says by the spelling of this one; None where
    that does not say."""
    told = LENGTHS.findall(second) or [b"0"]
    parts = head.spelling.filled(second, told[0])
    if parts is None or not told[0].isdigit() or len(told[0]) > 15:
        return None
    length = int(told[0]) if head.spelling.counted else head.length
    request_id = parts[head.spelling.id_at] if head.spelling.id_at >= 0 else head.request_id
    lines = b"".join(parts)
    return msgspec.structs.replace(head, lines=lines, length=length, request_id=request_id)


PLAIN = st.lists(
    st.tuples(
        st.sampled_from([*SPELT, "Accept", "X-Correlation-Id"]),
        st.sampled_from([": ", ": ", ":"]),
        st.sampled_from(["0", "12", "3"]),
    ),
    unique_by=lambda field: field[0].lower(),
    max_size=5,
)


@settings(max_examples=400)
@given(PLAIN, st.data())
def test_a_head_that_is_spelled_as_another_says_the_same_but_for_its_values(fields, data):
    first = seen_twice(fields)
    if first is None:
        return
    others = [
        (name, colon, data.draw(OTHER_VALUES) if name in SPELT else value)
        for name, colon, value in fields
    ]
    second = request(others)
    if second.index(b"\r\n\r\n") < len(second) - 4:
        return  # the head is over there
    found = filled_in(first, second[:-4])
    if found is not None:
        event(f"{len(first.spelling.steps)} values")
        assert verdict(judge, second) == verdict(lambda _: found, second)


@given(PLAIN | FIELDS, PLAIN | FIELDS)
def test_a_head_with_other_fields_is_not_spelled_the_same(fields, others):
    first = seen_twice(fields)
    if first is None:
        return
    second = request(others)
    found = filled_in(first, second[:-4])
    if found is not None:
        assert verdict(judge, second) == verdict(lambda _: found, second)


@given(PLAIN)
def test_a_spelling_finds_the_values_of_its_own_head(fields):
    first = seen_twice(fields)
    if first is None:
        return
    told = filled_in(first, request(fields)[:-4])
    assert told is not None
    assert verdict(lambda _: told, b"") == verdict(judge, request(fields))


@pytest.mark.parametrize(
    "second",
    [
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 7\r\nx: 1\r\ny: 2",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 7",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 7\r\nx: 1\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nx: 1\r\nContent-Length: 7",
        b"POST / HTTP/1.1\r\nHost: i\r\nContent-Length: 7\r\nx: 1",
        b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 7\r\nx: 1",
        b"POST / HTTP/1.1\r\nHost: h\r\ncontent-length: 7\r\nx: 1",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 7\r\nContent-Length: 7\r\nx: 1",
        b"",
    ],
)
def test_whatever_stands_elsewhere_than_in_a_value_is_another_spelling(second):
    templates = RequestTemplates()
    head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nx: 1"
    templates.judge(head + b"\r\n\r\n")
    spelling = templates.judge(head + b"\r\n\r\n").spelling
    assert spelling.filled(head, b"5") == [spelling.lines]
    assert spelling.filled(head, b"7") is None
    assert spelling.filled(second, b"7") is None


def answer(length, status="200 OK", more=()):
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *more]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def read(head, *, to_head):
    found = Answer()
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
    templates = AnswerTemplates()
    for length, status, more, to_head in [*heads, *heads]:
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
    templates = AnswerTemplates()
    for length, status, more, comes_last in [*heads, *heads]:
        head = answer(length, status, more)
        if comes_last:
            lines = head.split(b"\r\n")
            head = b"\r\n".join([lines[0], *sorted(lines[1:-2], reverse=True), b"", b""])
        try:
            found = read(head, to_head=False)
        except UpstreamGarbage:
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
def test_what_was_read_once_is_usual(more):
    templates = AnswerTemplates()
    templates.read(answer(5, more=more), to_head=False)
    assert templates.usual(answer(77, more=more)[:-4]).status == 200
    assert templates.usual(answer(77, more=("B: 1",))[:-4]) is NO_ANSWER
    assert templates.usual(b"") is NO_ANSWER


def test_an_answer_with_two_lengths_is_garbage_from_memory_too():
    templates = AnswerTemplates()
    templates.read(answer(5), to_head=False)
    with pytest.raises(UpstreamGarbage):
        templates.read(answer(5, more=["Content-Length: 6"]), to_head=False)
