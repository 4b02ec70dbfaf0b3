import re

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.forwarded import ForwardedHeaders
from omni_proxy.wire.head_caching.request_heads import (
    MAX_VARYING,
    TEMPLATE_BYTES,
    TEMPLATE_FIELDS,
    TEMPLATES,
    RequestHeadCache,
)
from omni_proxy.wire.header_fields import READ_FIELDS
from omni_proxy.wire.request import parse_request_head
from tests.example_counts import examples
from tests.wire.heads import HOSTILE

# Fields that the proxy does not read; some of them have a new value in every request.
UNREAD = [
    "traceparent", "TRACEPARENT", "Traceparent", "x-amzn-trace-id", "CF-Ray", "baggage",
    "sentry-trace", "X-B3-TraceId", "Authorization", "Cookie", "X-Unique", "Accept",
    "X-Request-Identity", "x-forwarded-for", "x_real_ip",
]  # fmt: skip
NAMES = st.sampled_from(
    [*UNREAD, "Content-Length", "content-length", "CONTENT-LENGTH", "X-Request-Id", "x-request-id",
     "Transfer-Encoding", "Host", "Connection", "X-Correlation-Id", "x-sglang-omni-request-id",
     "Idempotency-Key", "Content-Type", "Expect", "TE", "Upgrade", "X-Forwarded-Proto",
     "X-Omni-Weight-Version", "x-omni-min-weight-epoch", "x-sglang-omni-route-model"]
) | st.sampled_from(sorted(name.decode() for name in READ_FIELDS))  # fmt: skip
PLAIN_VALUES = ["0", "12", "abc", "00-ab-cd-01", "h", "a b", "x" * 200, "a: b", "cf-ray: 1", "\xe9"]
VALUES = st.sampled_from(
    [*PLAIN_VALUES, "+5", "1e3", "chunked", "close", "x-request-id", "x-unique, close",
     "traceparent", "100-continue", "", " ", "\t1", "1 ", "keep-alive", "application/json", "https"]
)  # fmt: skip
# Values that a parser could take for several fields, or read differently.
HOSTILE_VALUES = st.sampled_from(
    ["1\r\nHost: x", "1\r\nContent-Length: 2", "1\r\n", "1\n", "1\nTransfer-Encoding: chunked",
     "1\r\n folded", "1\r\n\tfolded", "1\rx", "a\0", "\x01", "\x7f", "12, 12", "1\r\nX : 1",
     "1\r\n: 1", "1\r\nno colon"]
)  # fmt: skip
COLONS = st.sampled_from([": "] * 6 + [":", ":  ", " : ", ":\t"])
FIELDS = st.lists(st.tuples(NAMES, COLONS, VALUES), max_size=6)
ANY_VALUES = st.lists(
    st.text(st.characters(max_codepoint=0xFF), max_size=8), min_size=5, max_size=5
)
TOKEN = st.text("abz-_.!~09AZ", min_size=1, max_size=6)
STARTS = st.sampled_from(
    ["POST /v1/chat/completions HTTP/1.1"] * 4
    + ["GET /v1/models HTTP/1.1", "POST http://h/v1/chat/completions HTTP/1.1",
       "POST /v1/chat/completions HTTP/1.0", "POST /v1/completions?a=1:2 HTTP/1.1"]
)  # fmt: skip
FORWARDED = st.none() | st.builds(
    ForwardedHeaders,
    st.sampled_from(["off", "append", "replace"]),
    st.sampled_from([b"", b"traceparent", b"x-unique", b"x-correlation-id", b"content-type"]),
).filter(bool)


def request(fields, start="POST /v1/chat/completions HTTP/1.1"):
    lines = [start, "Host: h", *(f"{name}{colon}{value}" for name, colon, value in fields)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def is_one_head(raw):
    return raw.index(b"\r\n\r\n") == len(raw) - 4


def uncached(forwarded_headers):
    """Parses heads without a cache."""

    def parse(raw):
        head = parse_request_head(raw)
        if forwarded_headers is not None:
            forwarded_headers.prepare(head, secure=False)
        return head

    return parse


def outcome(parse, raw):
    """The parsed head without its template, or the error."""
    try:
        head = parse(raw)
    except HttpError as error:
        return error.status, error.message, error.code
    return msgspec.structs.replace(head, template=None)


@st.composite
def head_sequences(draw):
    """Heads of a few clients. Each client has its fields; some values change in every head."""
    heads = []
    clients = [(draw(STARTS), draw(FIELDS)) for _ in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 12))):
        start, fields = draw(st.sampled_from(clients))
        fields = [
            (name, colon, draw(VALUES | HOSTILE_VALUES) if draw(st.integers(0, 3)) == 0 else value)
            for name, colon, value in fields
        ]
        heads.append(request(fields, start))
    return [head for head in heads if is_one_head(head)]


@settings(max_examples=examples(500))
@given(head_sequences(), FORWARDED)
def test_cached_heads_equal_parsed_ones(heads, forwarded_headers):
    cache = RequestHeadCache(forwarded_headers)
    for head in [*heads, *heads, *heads]:
        assert outcome(cache.parse, head) == outcome(uncached(forwarded_headers), head)
    event(f"{min(cache.size, 8)} templates")


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(TOKEN, st.sampled_from([": ", ":"]), st.just("")), max_size=5),
    st.lists(ANY_VALUES, min_size=3, max_size=8),
    FORWARDED,
)
def test_cached_heads_equal_parsed_ones_for_any_names_and_values(fields, rounds, forwarded_headers):
    cache = RequestHeadCache(forwarded_headers)
    for values in [["a", "b", "c", "d", "e"], ["f", "g", "h", "i", "j"], *rounds, *rounds]:
        fields_with_values = [
            (name, colon, value) for (name, colon, _), value in zip(fields, values, strict=False)
        ]
        head = request(
            [("Content-Length", ": ", "7"), *fields_with_values, ("X-Request-Id", ": ", "me")]
        )
        if is_one_head(head):
            assert outcome(cache.parse, head) == outcome(uncached(forwarded_headers), head)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_heads_are_rejected_with_a_warm_cache(name):
    hostile, status = HOSTILE[name]
    good = b"POST / HTTP/1.1\r\nhost: x\r\na: b\r\ncontent-length: 5\r\n\r\n"
    cache = RequestHeadCache()
    for head in (good, good, good.replace(b"a: b", b"a: c"), hostile, hostile, hostile, good):
        assert outcome(cache.parse, head) == outcome(parse_request_head, head)
    with pytest.raises(HttpError) as caught:
        cache.parse(hostile)
    assert caught.value.status == status


def varied(count, *, of="X-Unique", more=()):
    return [
        request([("Content-Length", ": ", str(n)), (of, ": ", f"unique-{n}"), *more])
        for n in range(1, count + 1)
    ]


def parse_counts(monkeypatch, cache, heads):
    """How often the cache parses each of the heads."""
    counts = []
    for head in heads:
        calls = []
        with monkeypatch.context() as patch:
            patch.setattr(
                "omni_proxy.wire.head_caching.request_heads.parse_request_head",
                lambda raw, calls=calls: calls.append(1) or parse_request_head(raw),
            )
            cache.parse(head)
        counts.append(len(calls))
    return counts


@pytest.mark.parametrize("name", [*UNREAD, "idempotency-key", "x-request-id", "never-heard-of"])
def test_a_head_with_a_field_that_varies_is_cached(monkeypatch, name):
    cache = RequestHeadCache()
    counts = parse_counts(monkeypatch, cache, varied(40, of=name))
    assert not any(counts[3:])
    assert cache.size == 1


def test_a_head_with_several_fields_that_vary_is_cached(monkeypatch):
    cache = RequestHeadCache()
    heads = [
        request([("Content-Length", ": ", "5"), *((name, ": ", f"{n}") for name in UNREAD)])
        for n in range(20)
    ]
    assert not any(parse_counts(monkeypatch, cache, heads)[3:])


def test_a_value_may_look_like_a_field(monkeypatch):
    cache = RequestHeadCache()
    heads = varied(10, of="X-Unique", more=[("CF-Ray", ": ", "X-Unique: 1")])
    heads = [head.replace(b"Host: h", b"Host: h\r\na: Content-Length: 1") for head in heads]
    heads += [head.replace(b"\r\n\r\n", b"\r\nX-Unique: 2\r\n\r\n") for head in heads]
    counts = parse_counts(monkeypatch, cache, heads)
    assert not any(counts[3:10])
    assert not any(counts[13:])


def test_clients_with_different_keys_share_an_entry(monkeypatch):
    cache = RequestHeadCache()
    heads = [
        request([("Authorization", ": ", f"Bearer {n % 7}"), ("User-Agent", ": ", f"a/{n % 3}")])
        for n in range(40)
    ]
    assert not any(parse_counts(monkeypatch, cache, heads)[6:])
    assert cache.size == 1


def test_a_head_is_cached_when_it_is_repeated(monkeypatch):
    cache = RequestHeadCache()
    heads = [request([], f"GET /v1/models/{n} HTTP/1.1") for n in range(TEMPLATES + 10)]
    assert parse_counts(monkeypatch, cache, heads) == [1] * len(heads)
    assert cache.size == 0
    parse_counts(monkeypatch, cache, heads[-5:])
    assert cache.size == 5


def test_other_heads_do_not_evict_a_used_entry(monkeypatch):
    cache = RequestHeadCache()
    cached = request([("Content-Length", ": ", "5")])
    parse_counts(monkeypatch, cache, [cached, cached])
    for n in range(2 * TEMPLATES):
        other = request([], f"GET /{n} HTTP/1.1")
        cache.parse(other)
        cache.parse(other)
        if n % 100 == 0:
            assert parse_counts(monkeypatch, cache, [cached]) == [0]
    assert cache.size == TEMPLATES


def test_an_entry_used_without_a_lookup_counts_as_used(monkeypatch):
    cache = RequestHeadCache()
    heads = [request([], f"GET /{n} HTTP/1.1") for n in range(TEMPLATES)]
    for head in heads:
        cache.parse(head)
        cache.parse(head)
    for _ in range(3):
        cache.parse(heads[0])  # the first time by its key, then without a lookup
    one_more = request([], "GET /one-more HTTP/1.1")
    parse_counts(monkeypatch, cache, [one_more, one_more])
    assert parse_counts(monkeypatch, cache, [heads[0], heads[1]]) == [0, 1]


@pytest.mark.parametrize(
    "head",
    [
        request([("X-Large", ": ", "x" * TEMPLATE_BYTES)]),
        request([("a", ": ", "1")] * (TEMPLATE_FIELDS + 1)),
    ],
    ids=["large", "many fields"],
)
def test_heads_that_are_too_large_are_not_cached(monkeypatch, head):
    cache = RequestHeadCache()
    assert parse_counts(monkeypatch, cache, [head] * 4) == [1] * 4
    assert cache.size == 0


def test_a_head_with_too_many_varying_fields_is_parsed_once_each_time(monkeypatch):
    cache = RequestHeadCache()
    names = [f"x-{n}" for n in range(MAX_VARYING + 1)]
    heads = [request([(name, ": ", f"{n}") for name in names]) for n in range(8)]
    assert parse_counts(monkeypatch, cache, heads)[3:] == [1] * 5


def test_repeated_fields_keep_their_order():
    cache = RequestHeadCache()
    for n in range(5):
        head = request(
            [("traceparent", ": ", f"{n}"), ("TRACEPARENT", ": ", f"{n + 1}"), ("a", ": ", "1"),
             ("Traceparent", ": ", f"{n + 2}")]
        )  # fmt: skip
        assert cache.parse(head).lines == parse_request_head(head).lines


def test_fields_with_equal_values_are_not_confused():
    forwarded_headers = ForwardedHeaders("off", b"traceparent")
    cache = RequestHeadCache(forwarded_headers)
    for request_id, trace in [
        ("1", "1"),
        ("1", "1"),
        ("1", "1"),
        ("2", "3"),
        ("4", "5"),
        ("6", "6"),
    ]:
        head = request([("X-Request-ID", ": ", request_id), ("traceparent", ": ", trace)])
        assert cache.parse(head).request_id == trace.encode()
        assert outcome(cache.parse, head) == outcome(uncached(forwarded_headers), head)


def test_a_varying_field_named_by_connection_is_not_forwarded():
    cache = RequestHeadCache()
    for n in range(6):
        head = request([("Connection", ": ", "x-unique"), ("X-Unique", ": ", f"{n}")])
        assert b"unique" not in cache.parse(head).lines.lower()
        assert outcome(cache.parse, head) == outcome(parse_request_head, head)


def test_the_third_head_is_read_from_the_cache():
    cache = RequestHeadCache()
    heads = [
        request([("Content-Length", ": ", f"{n}"), ("X-Request-Id", ": ", f"id-{n}")])
        for n in range(3)
    ]
    first, second, third = (cache.parse(head) for head in heads)
    assert first.template is None
    assert second.template is not None
    assert third.template is second.template
    assert (third.length, third.request_id) == (2, b"id-2")
    assert third.log_words is cache.parse(heads[0]).log_words


@pytest.mark.parametrize("value", ["+5", "5x", "0x5", "9" * 16, "", " ", "5 5"])
def test_an_invalid_length_is_rejected_with_a_warm_cache(value):
    cache = RequestHeadCache()
    for _ in range(3):
        cache.parse(request([("Content-Length", ": ", "5")]))
    head = request([("Content-Length", ": ", value)])
    assert outcome(cache.parse, head) == outcome(parse_request_head, head)


LENGTHS = re.compile(rb"\r\nContent-Length: ?(.*?)(?:\r\n|\Z)", re.IGNORECASE | re.DOTALL)
VARIABLE = ["Content-Length", "content-length", "X-Request-Id", "traceparent"]
# Values of the same fields in another head.
OTHER_VALUES = VALUES | HOSTILE_VALUES | st.just("7")


def cached_head(fields):
    """The head as the cache returns it; None if it is not cached."""
    cache = RequestHeadCache()
    head = None
    try:
        for trace in ("1", "2", "3"):
            with_trace = [(n, c, trace if n == "traceparent" else v) for n, c, v in fields]
            head = cache.parse(request(with_trace))
    except HttpError:
        return None
    return head if head.template is not None else None


def filled_in(head, second):
    """The head that the template of `head` makes of `second`, a head with its blank line.

    None if `second` does not match the template.
    """
    lengths = LENGTHS.findall(second) or [b"0"]
    parts = head.template.match(second, lengths[0])
    if parts is None or not lengths[0].isdigit() or len(lengths[0]) > 15:
        return None
    length = int(lengths[0]) if head.template.counted else head.length
    request_id = parts[head.template.id_index] if head.template.id_index >= 0 else head.request_id
    lines = b"".join(parts)
    return msgspec.structs.replace(head, lines=lines, length=length, request_id=request_id)


PLAIN = st.lists(
    st.tuples(
        st.sampled_from([*VARIABLE, "Accept", "X-Correlation-Id"]),
        st.sampled_from([": ", ": ", ":"]),
        st.sampled_from(["0", "12", "3"]),
    ),
    unique_by=lambda field: field[0].lower(),
    max_size=5,
)


@settings(max_examples=examples(400))
@given(PLAIN, st.data())
def test_a_head_made_of_a_template_equals_the_parsed_one(fields, data):
    first = cached_head(fields)
    if first is None:
        return
    others = [
        (name, colon, data.draw(OTHER_VALUES) if name in VARIABLE else value)
        for name, colon, value in fields
    ]
    second = request(others)
    if not is_one_head(second):
        return  # a value contains the end of the head
    from_template = filled_in(first, second)
    if from_template is not None:
        event(f"{len(first.template.steps)} values")
        assert outcome(parse_request_head, second) == outcome(lambda _: from_template, second)


@given(PLAIN | FIELDS, PLAIN | FIELDS)
def test_a_head_with_other_fields_does_not_match_the_template(fields, others):
    first = cached_head(fields)
    if first is None:
        return
    second = request(others)
    from_template = filled_in(first, second)
    if from_template is not None:
        assert outcome(parse_request_head, second) == outcome(lambda _: from_template, second)


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
def test_a_head_that_differs_outside_values_does_not_match_the_template(second):
    cache = RequestHeadCache()
    head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nx: 1"
    cache.parse(head + b"\r\n\r\n")
    template = cache.parse(head + b"\r\n\r\n").template
    assert template.match(head + b"\r\n\r\n", b"5") == [template.first]
    assert template.match(head + b"\r\n\r\n", b"7") is None
    assert template.match(head, b"5") is None  # no blank line
    assert template.match(second + b"\r\n\r\n", b"7") is None
