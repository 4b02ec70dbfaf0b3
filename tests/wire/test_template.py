import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.answer import Answer, UpstreamGarbage
from omni_proxy.wire.errors import Refusal
from omni_proxy.wire.head import RequestHead, judge
from omni_proxy.wire.template import TEMPLATES, AnswerTemplates, RequestTemplates

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
    return lines, [getattr(found, name) for name in RequestHead.__slots__ if name != "lines"]


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


def test_an_answer_with_two_lengths_is_garbage_from_memory_too():
    templates = AnswerTemplates()
    templates.read(answer(5), to_head=False)
    with pytest.raises(UpstreamGarbage):
        templates.read(answer(5, more=["Content-Length: 6"]), to_head=False)
