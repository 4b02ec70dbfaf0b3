import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.errors import Refusal
from omni_proxy.wire.head import (
    CHUNKED,
    MAX_HEAD_BYTES,
    MAX_TARGET_BYTES,
    drop_fields,
    find_end,
    hint_lines,
    judge,
    with_bearer,
)

LINE = b"GET / HTTP/1.1\r\n"
HOST = b"host: x\r\n"


def request(*fields, line=LINE, host=HOST):
    return line + host + b"".join(field + b"\r\n" for field in fields) + b"\r\n"


def refusal(raw):
    with pytest.raises(Refusal) as caught:
        judge(raw)
    return caught.value


def arrivals(raw):
    # whole, byte by byte, and with the next request behind them
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
def test_a_head_is_found_however_it_arrives_and_what_follows_is_left(raw):
    for pieces, rest in arrivals(raw):
        buffer, searched, ends = b"", 0, []
        for piece in pieces:
            buffer += piece
            ends.append(find_end(buffer, searched))
            searched = len(buffer)
        assert not any(ends[:-1])
        assert buffer[ends[-1] :] == rest
        assert judge(buffer[: ends[-1]]) == judge(raw)


HOSTILE = {
    "both lengths": (request(b"content-length: 5", b"transfer-encoding: chunked"), 400),
    "both, the other way": (request(b"transfer-encoding: chunked", b"content-length: 5"), 400),
    "two lengths": (request(b"content-length: 5", b"content-length: 6"), 400),
    "the same length twice": (request(b"content-length: 5", b"content-length: 5"), 400),
    "a list of lengths": (request(b"content-length: 5, 5"), 400),
    "a signed length": (request(b"content-length: +5"), 400),
    "a hexadecimal length": (request(b"content-length: 0x5"), 400),
    "an empty length": (request(b"content-length: "), 400),
    "a length past 64 bits": (request(b"content-length: 99999999999999999999"), 400),
    "a length past 18 digits": (request(b"content-length: 1000000000000000000"), 400),
    "two codings": (request(b"transfer-encoding: chunked", b"transfer-encoding: chunked"), 400),
    "a coding list": (request(b"transfer-encoding: gzip, chunked"), 501),
    "chunked twice in a list": (request(b"transfer-encoding: chunked, chunked"), 400),
    "chunked and a comma": (request(b"transfer-encoding: chunked,"), 400),
    "a comma and chunked": (request(b"transfer-encoding: , chunked"), 501),
    "chunked with a parameter": (request(b"transfer-encoding: chunked;a=b"), 400),
    "chunked in quotes": (request(b'transfer-encoding: "chunked"'), 400),
    "chunked and a vertical tab": (request(b"transfer-encoding: \x0bchunked"), 400),
    "chunked and a NUL": (request(b"transfer-encoding: chunked\x00"), 400),
    "a coding behind chunked": (request(b"transfer-encoding: chunked, identity"), 400),
    "an empty coding": (request(b"transfer-encoding:"), 400),
    "a length and an empty coding": (
        request(b"content-length: 5", b"transfer-encoding:"), 400,
    ),
    "a space before the coding's colon": (request(b"transfer-encoding : chunked"), 400),
    "an unknown coding": (request(b"transfer-encoding: xchunked"), 400),
    "chunked in 1.0": (request(b"transfer-encoding: chunked", line=b"GET / HTTP/1.0\r\n"), 400),
    "two hosts": (request(b"host: y"), 400),
    "the same host twice": (request(b"Host: x"), 400),
    "no host": (request(host=b""), 400),
    "a host with a path": (request(host=b"host: x/y\r\n"), 400),
    "a host with a user": (request(host=b"host: a@x\r\n"), 400),
    "a host with two ports": (request(host=b"host: x:1:2\r\n"), 400),
    "a host with a port of letters": (request(host=b"host: x:a\r\n"), 400),
    "a host with a bracket only": (request(host=b"host: [::1\r\n"), 400),
    "a host with a control byte": (request(host=b"host: x\x01\r\n"), 400),
    "a host with high bytes": (request(host=b"host: \xc3\xa4\r\n"), 400),
    "a host with a scheme": (request(host=b"host: http://x\r\n"), 400),
    "a target with another port": (request(line=b"GET http://x:81/ HTTP/1.1\r\n"), 400),
    "a host with spaces": (request(host=b"host: x y\r\n"), 400),
    "a folded line": (request(b"a: b", b" c"), 400),
    "a line folded by a tab": (request(b"a: b", b"\tc"), 400),
    "a fold in the first line": (request(host=b" host: x\r\n"), 400),
    "a bare LF in a value": (request(b"a: b\nc: d"), 400),
    "a bare CR in a value": (request(b"a: b\rc: d"), 400),
    "a bare LF after the request line": (b"GET / HTTP/1.1\nhost: x\r\n\r\n", 400),
    "a NUL in a value": (request(b"a: b\x00"), 400),
    "a control byte in a value": (request(b"a: \x01"), 400),
    "a DEL in a value": (request(b"a: \x7f"), 400),
    "a NUL in the target": (request(line=b"GET /\x00 HTTP/1.1\r\n"), 400),
    "a high byte in the target": (request(line=b"GET /\xff HTTP/1.1\r\n"), 400),
    "a space before the colon": (request(b"a : b"), 400),
    "a space in a name": (request(b"a b: c"), 400),
    "a high byte in a name": (request(b"\xe4: b"), 400),
    "an empty name": (request(b": b"), 400),
    "a field without a colon": (request(b"a"), 400),
    "a relative target": (request(line=b"GET x HTTP/1.1\r\n"), 400),
    "a target that is a query": (request(line=b"GET ?x HTTP/1.1\r\n"), 400),
    "a fragment": (request(line=b"GET /a#b HTTP/1.1\r\n"), 400),
    "another host in the target": (request(line=b"GET http://y/ HTTP/1.1\r\n"), 400),
    "a user in the target": (request(line=b"GET http://a@x/ HTTP/1.1\r\n"), 400),
    "a strange scheme": (request(line=b"GET ftp://x/ HTTP/1.1\r\n"), 400),
    "the asterisk for GET": (request(line=b"GET * HTTP/1.1\r\n"), 400),
    "two spaces": (request(line=b"GET  / HTTP/1.1\r\n"), 400),
    "a space at the end": (request(line=b"GET / HTTP/1.1 \r\n"), 400),
    "a tab as space": (request(line=b"GET\t/ HTTP/1.1\r\n"), 400),
    "a lower-case method": (request(line=b"get / HTTP/1.1\r\n"), 400),
    "an unknown method": (request(line=b"FETCH / HTTP/1.1\r\n"), 400),
    "another protocol": (request(line=b"GET / RTSP/1.0\r\n"), 400),
    "CONNECT": (request(line=b"CONNECT x:80 HTTP/1.1\r\n"), 405),
    "TRACE": (request(line=b"TRACE / HTTP/1.1\r\n"), 405),
    "HTTP/0.9": (b"GET /\r\nhost: x\r\n\r\n", 505),
    "HTTP/2.0 in a line": (request(line=b"GET / HTTP/2.0\r\n"), 505),
    "HTTP/1.2": (request(line=b"GET / HTTP/1.2\r\n"), 400),
    "an HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\n", 505),
    "another expectation": (request(b"expect: wonders"), 417),
    "a second expectation": (request(b"expect: 100-continue", b"expect: wonders"), 417),
    "a target too long": (request(line=b"GET /%b HTTP/1.1\r\n" % (b"a" * MAX_TARGET_BYTES)), 414),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "status"), HOSTILE.values(), ids=HOSTILE)
def test_what_can_be_read_in_two_ways_is_refused_and_the_connection_closed(raw, status):
    assert find_end(raw) == len(raw)
    refused = refusal(raw)
    assert (refused.status, refused.close) == (status, True)


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
def test_what_can_not_become_a_head_is_refused_without_waiting_for_its_end(raw, status, code):
    with pytest.raises(Refusal) as caught:
        find_end(raw)
    assert (caught.value.status, caught.value.code, caught.value.close) == (status, code, True)


def test_heads_and_targets_up_to_the_limits_pass():
    frame = request(line=b"GET / HTTP/1.1\r\n")
    field = b"a: " + b"b" * (MAX_HEAD_BYTES - len(frame) - 5)
    full = request(field)
    assert len(full) == find_end(full) == MAX_HEAD_BYTES
    longest = b"/" * MAX_TARGET_BYTES
    raw = request(line=b"GET %b HTTP/1.1\r\n" % longest)
    assert find_end(raw[:-4]) == 0
    assert judge(raw).target == longest


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        (b"http://x/a?b", b"/a?b"),
        (b"HTTPS://X/a", b"/a"),
        (b"http://x", b"/"),
        (b"http://x?q", b"/?q"),
        (b"/http://y/", b"/http://y/"),
        (b"//y/a", b"//y/a"),
    ],
)
def test_a_target_goes_on_in_origin_form(target, sent):
    head = judge(request(line=b"GET %b HTTP/1.1\r\n" % target))
    assert head.target == sent
    assert head.lines.startswith(b"GET %b HTTP/1.1\r\n" % sent)


def test_the_asterisk_is_for_options():
    assert judge(request(line=b"OPTIONS * HTTP/1.1\r\n")).target == b"*"


def test_the_clients_fields_keep_their_order_their_case_and_their_repetitions():
    fields = (b"Cookie: a=1", b"X-B: 2", b"cookie:  b=2 ", b"X-Empty:", b"X-High: \xe4")
    lines = judge(request(*fields)).lines
    assert lines == LINE + b"".join(field + b"\r\n" for field in fields)


ENDS_HERE = (
    b"Connection: close", b"Keep-Alive: timeout=5", b"Proxy-Authenticate: a",
    b"Proxy-Authorization: b", b"Proxy-Connection: close", b"TE: trailers", b"Trailer: x",
    b"Trailers: x", b"Transfer-Encoding: chunked", b"Upgrade: h2c", b"Expect: 100-continue",
    b"X-SGLang-Omni-Route-Model: m", b"x-sglang-omni-route-stream: true",
    b"x-sglang-omni-route-capabilities: chat", b"x-sglang-omni-route-worker: w",
)  # fmt: skip


@pytest.mark.parametrize("field", ENDS_HERE)
def test_fields_that_end_here_are_not_sent_on(field):
    lines = judge(request(b"a: 1", field, b"b: 2")).lines
    assert lines == LINE + b"a: 1\r\nb: 2\r\n"


def test_fields_that_look_like_ours_are_sent_on():
    fields = (b"te-x: 1", b"connections: 2", b"x-host: 3", b"x-sglang-omni-route-attempt: 4")
    assert judge(request(*fields)).lines == LINE + b"".join(field + b"\r\n" for field in fields)


def test_fields_that_the_connection_nominates_are_not_sent_on():
    raw = request(b"X-A: 1", b"Connection: close, x-a", b"b: 2", b"connection: X-C", b"x-c: 3")
    assert judge(raw).lines == LINE + b"b: 2\r\n"


def test_an_empty_option_of_the_connection_nominates_nothing():
    raw = request(b"a: 1", b"connection: , x-a,", b"x-a: 2", b"b:")
    assert judge(raw).lines == LINE + b"a: 1\r\nb:\r\n"


def test_hints_are_read_and_stripped():
    head = judge(request(b"X-SGLang-Omni-Route-Model:  m ", b"x-sglang-omni-route-stream: true"))
    assert head.hints == {b"model": b"m", b"stream": b"true"}
    assert head.lines == LINE


def test_conditions_on_weights_are_read_and_stripped_and_may_be_written_again():
    head = judge(request(b"X-Omni-Weight-Version: =v 1", b"x-omni-min-weight-epoch:7", b"a: 1"))
    assert head.hints == {b"weight-version": b"=v 1", b"min-weight-epoch": b"7"}
    assert head.lines == LINE + b"a: 1\r\n"
    assert judge(request(hint_lines(head.hints)[:-2])).hints == head.hints
    assert judge(request(b"x-omni-weight-version-end: v")).lines.count(b"version-end")


@pytest.mark.parametrize("name", [b"x-omni-weight-version", b"x-omni-min-weight-epoch"])
def test_a_condition_on_weights_is_said_once(name):
    with pytest.raises(Refusal) as caught:
        judge(request(name + b": =1", name + b": =1"))
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
def test_the_connection_is_kept_as_the_client_asks(line, fields, kept):
    assert judge(request(*fields, line=line)).keep_alive is kept


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
def test_the_length_of_the_body_is_told_once(field, length):
    assert judge(request(field)).length == length


def test_an_expectation_of_http_1_0_means_nothing():
    field = b"Expect: 100-Continue"
    assert judge(request(field)).expects_continue
    assert not judge(request(field, line=b"GET / HTTP/1.0\r\n")).expects_continue


def test_an_upgrade_counts_only_where_the_connection_names_it():
    assert judge(request(b"upgrade: WebSocket", b"connection: Upgrade")).upgrade == b"websocket"
    assert judge(request(b"upgrade: websocket")).upgrade == b""


def test_the_request_id_is_taken_from_the_first_field_of_the_contract():
    ours, usual, other = b"x-sglang-omni-request-id: a", b"X-Request-ID: b", b"x-correlation-id: c"
    assert judge(request(other, usual, ours)).request_id == b"a"
    assert judge(request(other, usual)).request_id == b"b"
    assert judge(request(other, b"x-request-id:")).request_id == b"c"
    assert judge(request()).request_id == b""


def test_a_key_of_ours_replaces_whatever_the_client_presented():
    lines = b"GET / HTTP/1.1\r\nAuthorization: Bearer theirs\r\na: b\r\n"
    assert with_bearer(lines, b"ours") == LINE + b"a: b\r\nauthorization: Bearer ours\r\n"


def test_dropping_fields_leaves_the_request_line_alone():
    lines = b"GET /a: HTTP/1.1\r\nA : 1\r\nb: 2\r\na: 3\r\n"
    assert drop_fields(lines, frozenset((b"a",))) == b"GET /a: HTTP/1.1\r\nb: 2\r\n"


# Mostly good parts, so that about half of all heads pass.
def mostly(good, bad):
    return st.integers(0, 15).flatmap(lambda dice: bad if dice == 0 else good)


TOKENS = st.text("abcXYZ019-_!~", min_size=1, max_size=8).map(str.encode)
VALUES = mostly(
    st.text("abc XYZ019,;=\xe4\t", max_size=8).map(lambda text: text.encode("latin-1"))
    | st.sampled_from([b"chunked", b"5", b"05", b"close", b"keep-alive, a", b""]),
    st.binary(max_size=12),
)
NAMES = mostly(
    TOKENS,
    st.sampled_from([b"Host", b"content-length", b"transfer-encoding", b"connection", b"expect"]),
)
TARGETS = mostly(
    st.text("ab/?%&=.~", max_size=8).map(lambda tail: b"/" + tail.encode()),
    st.binary(max_size=8) | st.sampled_from([b"*", b"http://x/", b"http://x?a", b"x"]),
)
METHODS = mostly(st.sampled_from([b"GET", b"POST", b"OPTIONS", b"HEAD"]), TOKENS)
LINE_ENDS = mostly(st.just(b"\r\n"), st.sampled_from([b"\n", b"\r", b"\r\n ", b" \r\n"]))
FRAMINGS = mostly(
    st.sampled_from([[], [b"Content-Length: 5"], [b"Transfer-Encoding: chunked"]]),
    st.lists(st.sampled_from([b"content-length: 5", b"transfer-encoding: chunked"]), max_size=2),
)
HOSTS = mostly(st.just([b"host: x"]), st.sampled_from([[], [b"host: x", b"host: y"], [b"host:"]]))


@st.composite
def heads(draw):
    version = draw(mostly(st.just(b"1.1"), st.just(b"1.0")))
    line = b"%b %b HTTP/%b" % (draw(METHODS), draw(TARGETS), version)
    fields = st.builds(b"%b:%b".__mod__, st.tuples(NAMES, VALUES))
    lines = [line, *draw(HOSTS), *draw(st.lists(fields, max_size=3)), *draw(FRAMINGS)]
    raw = b"".join(one + draw(LINE_ENDS) for one in lines[:-1]) + lines[-1] + b"\r\n\r\n"
    return raw[: raw.index(b"\r\n\r\n") + 4]


# None where h11 refuses the bytes.
def oracle(raw):
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=2 * MAX_HEAD_BYTES)
    reader.receive_data(raw)
    try:
        event = reader.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


@given(heads())
def test_what_passes_is_read_by_h11_in_the_same_way(raw):
    try:
        head = judge(raw)
    except Refusal:
        return
    theirs = oracle(raw)
    assert theirs is not None
    assert (theirs.method, theirs.http_version) == (
        head.method,
        b"1.0" if head.http_1_0 else b"1.1",
    )
    path = theirs.target.removeprefix(b"http://x")
    assert head.target == (path if path.startswith((b"/", b"*")) else b"/" + path)
    ours = [line.partition(b":") for line in head.lines.split(b"\r\n")[1:-1]]
    sent_on = [(name.lower(), value.strip(b" \t")) for name, _, value in ours]
    assert sent_on == [field for field in theirs.headers if field in sent_on]
    said = dict(theirs.headers)
    if head.length == CHUNKED:
        assert said[b"transfer-encoding"] == b"chunked"
    else:
        assert int(said.get(b"content-length", b"0")) == head.length


@given(heads())
def test_what_goes_on_would_pass_again_unchanged(raw):
    try:
        head = judge(raw)
    except Refusal:
        return
    framing = b"content-length: %d\r\n" % max(head.length, 0)
    again = judge(head.lines + b"host: worker\r\n" + framing + b"\r\n")
    assert (again.lines, again.target) == (head.lines, head.target)


# h11 reads these, and we refuse them: some other server would read each of them otherwise.
STRICTER = {
    "RFC 9112 6.3, both lengths: h11 lets the coding win": "both lengths",
    "RFC 9112 6.3, equal lengths: h11 folds them into one": "the same length twice",
    "RFC 9112 6.3, a list of equal lengths: h11 folds it": "a list of lengths",
    "RFC 9112 5.2, folding: h11 unfolds": "a folded line",
    "RFC 9112 2.2, bare LF: h11 takes it as a line end": "a bare LF in a value",
    "RFC 9112 3.2, targets: h11 takes any visible characters": "a relative target",
    "RFC 9110 4.2.4, users in targets: not h11's concern": "a user in the target",
    "RFC 9110 9.1, methods: h11 takes any token": "an unknown method",
    "RFC 9110 10.1.1, expectations: not h11's concern": "another expectation",
    "RFC 9112 6.1, codings of HTTP/1.0: h11 reads them": "chunked in 1.0",
    "RFC 3986 3.2, hosts: h11 does not look into them": "a host with a path",
    "TRACE would hand secrets back: not h11's concern": "TRACE",
}


@pytest.mark.parametrize("case", STRICTER.values(), ids=STRICTER)
def test_where_we_are_stricter_than_h11(case):
    raw, _ = HOSTILE[case]
    assert oracle(raw) is not None
    refusal(raw)
