import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import (
    CHUNKED,
    MAX_HEAD_BYTES,
    MAX_TARGET_BYTES,
    drop_fields,
    find_head_end,
    hint_lines,
    parse_request_head,
    set_bearer,
)
from tests.wire.heads import HOSTILE, LINE, refusal, request


def arrivals(raw):
    # complete, byte by byte, and with the next request after it
    yield [raw], b""
    yield [raw[i : i + 1] for i in range(len(raw))], b""
    yield [raw + b"GET /next HTTP/1.1\r\n"], b"GET /next HTTP/1.1\r\n"


GOOD = [
    request(),
    request(b"a: b", b"content-length: 5"),
    request(line=b"POST /v1/chat/completions?x=1&y HTTP/1.1\r\n"),
    request(line=b"GET / HTTP/1.0\r\n", host=b""),
    request(b"connection: upgrade", b"upgrade: websocket"),
    request(b"transfer-encoding: chunked"),
]


@pytest.mark.parametrize("raw", GOOD)
def test_the_end_of_a_head_is_found_in_any_pieces(raw):
    for pieces, rest in arrivals(raw):
        buffer, searched, ends = b"", 0, []
        for piece in pieces:
            buffer += piece
            ends.append(find_head_end(buffer, searched))
            searched = len(buffer)
        assert not any(ends[:-1])
        assert buffer[ends[-1] :] == rest
        assert parse_request_head(buffer[: ends[-1]]) == parse_request_head(raw)


@pytest.mark.parametrize(("raw", "status"), HOSTILE.values(), ids=HOSTILE)
def test_ambiguous_heads_are_rejected_and_the_connection_closed(raw, status):
    assert find_head_end(raw) == len(raw)
    error = refusal(raw)
    assert (error.status, error.close) == (status, True)


UNFINISHED = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "tls_on_plain_port"),
    "bare line ends": (b"GET / HTTP/1.1\nhost: x\n\n", 400, "malformed_request"),
    "a target without end": (
        b"GET /" + b"a" * (MAX_TARGET_BYTES + 64), 414, "target_too_long",
    ),
    "fields without end": (LINE + b"a: b\r\n" * 12000, 431, "head_too_large"),
    "a head that ends too late": (
        LINE + b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n", 431, "head_too_large",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "status", "code"), UNFINISHED.values(), ids=UNFINISHED)
def test_bytes_that_cannot_become_a_head_are_rejected_at_once(raw, status, code):
    with pytest.raises(HttpError) as caught:
        find_head_end(raw)
    assert (caught.value.status, caught.value.code, caught.value.close) == (status, code, True)


def test_heads_and_targets_up_to_the_limits_are_accepted():
    shortest = request(line=b"GET / HTTP/1.1\r\n")
    field = b"a: " + b"b" * (MAX_HEAD_BYTES - len(shortest) - 5)
    full = request(field)
    assert len(full) == find_head_end(full) == MAX_HEAD_BYTES
    longest = b"/" * MAX_TARGET_BYTES
    raw = request(line=b"GET %b HTTP/1.1\r\n" % longest)
    assert find_head_end(raw[:-4]) == 0
    assert parse_request_head(raw).target == longest


@pytest.mark.parametrize(
    ("target", "forwarded"),
    [
        (b"http://x/a?b", b"/a?b"),
        (b"HTTPS://X/a", b"/a"),
        (b"http://x", b"/"),
        (b"http://x?q", b"/?q"),
        (b"/http://y/", b"/http://y/"),
        (b"//y/a", b"//y/a"),
    ],
)
def test_a_target_is_forwarded_in_origin_form(target, forwarded):
    head = parse_request_head(request(line=b"GET %b HTTP/1.1\r\n" % target))
    assert head.target == forwarded
    assert head.lines.startswith(b"GET %b HTTP/1.1\r\n" % forwarded)


def test_the_asterisk_is_a_target_of_options():
    assert parse_request_head(request(line=b"OPTIONS * HTTP/1.1\r\n")).target == b"*"


def test_forwarded_fields_keep_order_case_and_repetitions():
    fields = (b"Cookie: a=1", b"X-B: 2", b"cookie:  b=2 ", b"X-Empty:", b"X-High: \xe4")
    lines = parse_request_head(request(*fields)).lines
    assert lines == LINE + b"".join(field + b"\r\n" for field in fields)


NOT_FORWARDED = (
    b"Connection: close", b"Keep-Alive: timeout=5", b"Proxy-Authenticate: a",
    b"Proxy-Authorization: b", b"Proxy-Connection: close", b"TE: trailers", b"Trailer: x",
    b"Trailers: x", b"Transfer-Encoding: chunked", b"Upgrade: h2c", b"Expect: 100-continue",
    b"X-SGLang-Omni-Route-Model: m", b"x-sglang-omni-route-stream: true",
    b"x-sglang-omni-route-capabilities: chat", b"x-sglang-omni-route-worker: w",
)  # fmt: skip


@pytest.mark.parametrize("field", NOT_FORWARDED)
def test_hop_by_hop_fields_and_hints_are_not_forwarded(field):
    lines = parse_request_head(request(b"a: 1", field, b"b: 2")).lines
    assert lines == LINE + b"a: 1\r\nb: 2\r\n"


def test_fields_with_similar_names_are_forwarded():
    fields = (b"te-x: 1", b"connections: 2", b"x-host: 3", b"x-sglang-omni-route-attempt: 4")
    assert parse_request_head(request(*fields)).lines == LINE + b"".join(
        field + b"\r\n" for field in fields
    )


def test_fields_named_by_connection_are_not_forwarded():
    raw = request(b"X-A: 1", b"Connection: close, x-a", b"b: 2", b"connection: X-C", b"x-c: 3")
    assert parse_request_head(raw).lines == LINE + b"b: 2\r\n"


def test_an_empty_connection_option_is_ignored():
    raw = request(b"a: 1", b"connection: , x-a,", b"x-a: 2", b"b:")
    assert parse_request_head(raw).lines == LINE + b"a: 1\r\nb:\r\n"


def test_hints_are_read_and_removed():
    head = parse_request_head(
        request(b"X-SGLang-Omni-Route-Model:  m ", b"x-sglang-omni-route-stream: true")
    )
    assert head.hints == {b"model": b"m", b"stream": b"true"}
    assert head.lines == LINE


def test_weight_version_conditions_are_read_removed_and_can_be_written():
    head = parse_request_head(
        request(b"X-Omni-Weight-Version: =v 1", b"x-omni-min-weight-epoch:7", b"a: 1")
    )
    assert head.hints == {b"weight-version": b"=v 1", b"min-weight-epoch": b"7"}
    assert head.lines == LINE + b"a: 1\r\n"
    assert parse_request_head(request(hint_lines(head.hints)[:-2])).hints == head.hints
    assert parse_request_head(request(b"x-omni-weight-version-end: v")).lines.count(b"version-end")


@pytest.mark.parametrize("name", [b"Authorization", b"X-Api-Key"])
@pytest.mark.parametrize("between", [b"", b"Accept: a\r\n"])
def test_a_repeated_credential_is_rejected(name, between):
    """A worker might use the last one, while the proxy has checked the first."""
    lines = b"%b: Bearer a\r\n%b%b: Bearer b\r\n" % (name, between, name.lower())
    raw = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n%b\r\n" % lines
    with pytest.raises(HttpError) as refused:
        parse_request_head(raw)
    assert refused.value.status == 400
    assert "given twice" in refused.value.message


def test_one_credential_of_each_kind_is_accepted():
    lines = b"Authorization: Basic a\r\nX-Api-Key: b\r\nX-Authorization: c\r\n"
    head = parse_request_head(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n%b\r\n" % lines)
    assert lines in head.lines


@pytest.mark.parametrize("name", [b"x-omni-weight-version", b"x-omni-min-weight-epoch"])
def test_a_weight_version_condition_may_occur_once(name):
    with pytest.raises(HttpError) as caught:
        parse_request_head(request(name + b": =1", name + b": =1"))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("line", "fields", "kept"),
    [
        (LINE, [], True),
        (LINE, [b"connection: close"], False),
        (LINE, [b"connection: Keep-Alive, Close"], False),
        (b"GET / HTTP/1.0\r\n", [], False),
        (b"GET / HTTP/1.0\r\n", [b"connection: keep-alive"], True),
    ],
)
def test_keep_alive_depends_on_version_and_connection(line, fields, kept):
    assert parse_request_head(request(*fields, line=line)).keep_alive is kept


@pytest.mark.parametrize(
    ("field", "length"),
    [
        (b"a: b", 0),
        (b"content-length: 0", 0),
        (b"Content-Length: 007", 7),
        (b"content-length:  12 ", 12),
        (b"Transfer-Encoding: Chunked", CHUNKED),
    ],
)
def test_the_length_of_the_body(field, length):
    assert parse_request_head(request(field)).length == length


def test_an_expectation_of_http_1_0_is_ignored():
    field = b"Expect: 100-Continue"
    assert parse_request_head(request(field)).expects_continue
    assert not parse_request_head(request(field, line=b"GET / HTTP/1.0\r\n")).expects_continue


def test_an_upgrade_counts_only_if_connection_names_it():
    assert (
        parse_request_head(request(b"upgrade: WebSocket", b"connection: Upgrade")).upgrade
        == b"websocket"
    )
    assert parse_request_head(request(b"upgrade: websocket")).upgrade == b""


def test_the_request_id_is_read_from_the_preferred_field():
    own, usual, other = b"x-sglang-omni-request-id: a", b"X-Request-ID: b", b"x-correlation-id: c"
    assert parse_request_head(request(other, usual, own)).request_id == b"a"
    assert parse_request_head(request(other, usual)).request_id == b"b"
    assert parse_request_head(request(other, b"x-request-id:")).request_id == b"c"
    assert parse_request_head(request()).request_id == b""


def test_the_workers_key_replaces_the_clients():
    lines = b"GET / HTTP/1.1\r\nAuthorization: Bearer client\r\na: b\r\n"
    assert set_bearer(lines, b"worker") == LINE + b"a: b\r\nauthorization: Bearer worker\r\n"


def test_dropping_fields_keeps_the_request_line():
    lines = b"GET /a: HTTP/1.1\r\nA : 1\r\nb: 2\r\na: 3\r\n"
    assert drop_fields(lines, frozenset((b"a",))) == b"GET /a: HTTP/1.1\r\nb: 2\r\n"


@given(st.integers(0, 99999), st.sampled_from(["x", "[::1]", ""]))
def test_a_host_may_have_any_valid_port(port, host):
    raw = request(host=f"host: {host}:{port}\r\n".encode())
    if port <= 65535:
        assert parse_request_head(raw).host == f"{host}:{port}".encode()
    else:
        assert refusal(raw).status == 400
