import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.forwarded import ForwardedHeaders, field_value
from omni_proxy.wire.head_caching.request_heads import RequestHeadCache
from omni_proxy.wire.request import parse_request_head

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
CLAIMS = (b"X-Forwarded-For: 1.1.1.1", b"x-forwarded-proto: https", b"Forwarded: for=1.1.1.1",
          b"X-Real-IP: 1.1.1.1", b"x-forwarded-host: there", b"X-Forwarded-Prefix: /a")  # fmt: skip


def request(*fields, line=LINE, host=b"Host: here\r\n"):
    return line + host + b"".join(field + b"\r\n" for field in fields) + b"\r\n"


def prepared(forwarded_headers, raw, *, secure=False):
    head = parse_request_head(raw)
    forwarded_headers.prepare(head, secure=secure)
    return head


def fields_of(lines):
    return lines.split(b"\r\n")[1:-1]


def test_off_changes_nothing():
    assert not ForwardedHeaders()
    assert (
        prepared(ForwardedHeaders(), request(*CLAIMS)).lines
        == LINE + b"\r\n".join(CLAIMS) + b"\r\n"
    )
    assert ForwardedHeaders().forwarded_for_line("1.2.3.4:5") == b""


def test_append_adds_missing_fields():
    head = prepared(ForwardedHeaders("append"), request(b"a: 1"))
    assert fields_of(head.lines) == [
        b"a: 1", b"x-forwarded-proto: http", b"x-forwarded-host: here", b"via: 1.1 omni-proxy",
    ]  # fmt: skip
    assert b"x-forwarded-proto: https\r\n" in prepared(
        ForwardedHeaders("append"), request(), secure=True
    ).lines  # fmt: skip


def test_append_keeps_the_fields_of_an_earlier_proxy():
    head = prepared(ForwardedHeaders("append"), request(*CLAIMS, b"Via: 1.1 balancer"))
    assert fields_of(head.lines) == [*CLAIMS, b"Via: 1.1 balancer", b"via: 1.1 omni-proxy"]


def test_replace_drops_fields_spelled_with_underscores():
    claims = (b"X_Forwarded_For: 1.1.1.1", b"X-Forwarded_Proto: https", b"x_real_ip: 1.1.1.1")
    head = prepared(ForwardedHeaders("replace"), request(*claims))
    assert not [field for field in fields_of(head.lines) if b"_" in field]


def test_replace_drops_the_clients_fields():
    head = prepared(ForwardedHeaders("replace"), request(b"a: 1", *CLAIMS, b"x-forwarded: 2"))
    assert fields_of(head.lines) == [
        b"a: 1", b"x-forwarded: 2", b"x-forwarded-proto: http", b"x-forwarded-host: here",
        b"via: 1.1 omni-proxy",
    ]  # fmt: skip


def test_an_http_1_0_request_without_a_host_has_no_x_forwarded_host():
    head = prepared(ForwardedHeaders("append"), request(line=b"GET / HTTP/1.0\r\n", host=b""))
    assert fields_of(head.lines) == [b"x-forwarded-proto: http", b"via: 1.0 omni-proxy"]


@pytest.mark.parametrize(
    ("peer", "line"),
    [
        ("1.2.3.4:567", b"x-forwarded-for: 1.2.3.4\r\n"),
        ("[2001:db8::1]:567", b"x-forwarded-for: 2001:db8::1\r\n"),
        ("unix", b""),
    ],
)
def test_x_forwarded_for_has_the_address_of_the_client(peer, line):
    assert ForwardedHeaders("append").forwarded_for_line(peer) == line


def test_the_configured_id_field_precedes_the_default_ones():
    forwarded_headers = ForwardedHeaders(id_name=b"x-trace")
    raw = request(b"X-Request-Id: a", b"X-Trace:  b ")
    assert prepared(forwarded_headers, raw).request_id == b"b"
    assert prepared(forwarded_headers, request(b"X-Request-Id: a", b"x-trace:")).request_id == b"a"
    assert forwarded_headers


def test_an_id_is_added_if_there_is_none():
    forwarded_headers = ForwardedHeaders(id_name=b"x-trace")
    with_id = LINE + b"X-Trace: b\r\n"
    assert forwarded_headers.set_request_id(with_id, b"b") == with_id
    assert (
        forwarded_headers.set_request_id(LINE + b"x-trace:\r\na: 1\r\n", b"b")
        == LINE + b"a: 1\r\nx-trace: b\r\n"
    )
    assert field_value(LINE + b"a: x-trace\r\n", b"x-trace") == b""


FIELDS = [
    *CLAIMS, b"X-Request-Id: 1", b"x-request-id: 2", b"X-Trace: 3", b"Content-Length: 4",
    b"x-correlation-id: 5", b"Via: 1.0 a", b"a: 1",
]  # fmt: skip


@given(
    st.sampled_from(
        [
            ForwardedHeaders("append"),
            ForwardedHeaders("replace", b"x-trace"),
            ForwardedHeaders("off", b"x-request-id"),
        ]
    ),
    st.lists(st.lists(st.sampled_from(FIELDS), max_size=5), max_size=8),
)
def test_a_cached_head_gets_the_same_fields_as_a_parsed_one(forwarded_headers, heads):
    cache = RequestHeadCache(forwarded_headers)

    def summary(head):
        return sorted(head.lines.split(b"\r\n")), head.request_id, head.length

    for fields in [*heads, *heads]:
        lengths = [field for field in fields if field.startswith(b"Content-Length")]
        raw = request(*(field for field in fields if field not in lengths), *lengths[:1])
        assert summary(cache.parse(raw)) == summary(prepared(forwarded_headers, raw))


SOURCES = ForwardedHeaders(id_sources=(b"x-a", b"x-b"))


@pytest.mark.parametrize(
    ("fields", "request_id"),
    [
        ((b"X-B: b", b"X-A: a", b"X-Request-ID: r"), b"a"),
        ((b"X-B: b", b"X-Request-ID: r"), b"b"),
        ((b"X-A: ", b"X-B: b"), b"b"),
        ((b"X-Request-ID: r",), b"r"),
        ((), b""),
    ],
)
def test_the_first_id_source_with_a_value_is_used(fields, request_id):
    raw = request(*fields)
    head = prepared(SOURCES, raw)
    assert head.request_id == request_id
    assert head.lines == parse_request_head(raw).lines  # no field is added
    assert SOURCES


def test_cached_heads_have_the_id_of_their_own_source():
    cache = RequestHeadCache(SOURCES)
    for number in range(5):
        raw = request(b"X-Request-ID: r%d" % number, b"x-a: a%d" % number)
        assert cache.parse(raw).request_id == b"a%d" % number
    assert cache.parse(raw).template is not None
