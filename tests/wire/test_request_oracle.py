"""Random request heads: h11 parses accepted heads in the same way, and the proxy is stricter."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import (
    CHUNKED,
    MAX_HEAD_BYTES,
    parse_request_head,
)
from tests.wire.heads import HOSTILE, refusal


def mostly(good, bad):
    """Mostly good parts, so that about half of all heads are accepted."""
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


def parse_with_h11(raw):
    """None if h11 rejects the bytes."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=2 * MAX_HEAD_BYTES)
    reader.receive_data(raw)
    try:
        event = reader.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


@given(heads())
def test_accepted_heads_are_parsed_as_by_h11(raw):
    try:
        head = parse_request_head(raw)
    except HttpError:
        return
    expected = parse_with_h11(raw)
    assert expected is not None
    assert (expected.method, expected.http_version) == (
        head.method,
        b"1.0" if head.http_1_0 else b"1.1",
    )
    path = expected.target.removeprefix(b"http://x")
    assert head.target == (path if path.startswith((b"/", b"*")) else b"/" + path)
    fields = [line.partition(b":") for line in head.lines.split(b"\r\n")[1:-1]]
    forwarded = [(name.lower(), value.strip(b" \t")) for name, _, value in fields]
    assert forwarded == [field for field in expected.headers if field in forwarded]
    headers = dict(expected.headers)
    if head.length == CHUNKED:
        assert headers[b"transfer-encoding"] == b"chunked"
    else:
        assert int(headers.get(b"content-length", b"0")) == head.length


@given(heads())
def test_a_forwarded_head_parses_to_itself(raw):
    try:
        head = parse_request_head(raw)
    except HttpError:
        return
    framing = b"content-length: %d\r\n" % max(head.length, 0)
    again = parse_request_head(head.lines + b"host: worker\r\n" + framing + b"\r\n")
    assert (again.lines, again.target) == (head.lines, head.target)


# h11 accepts these, and the proxy rejects them: other servers interpret them differently.
STRICTER = {
    "RFC 9112 6.3, both lengths: h11 prefers the coding": "both lengths",
    "RFC 9112 6.3, equal lengths: h11 merges them": "the same length twice",
    "RFC 9112 6.3, a list of equal lengths: h11 merges it": "a list of lengths",
    "RFC 9112 5.2, folding: h11 unfolds": "a folded line",
    "RFC 9112 2.2, bare LF: h11 accepts it as a line end": "a bare LF in a value",
    "RFC 9112 3.2, targets: h11 accepts any visible characters": "a relative target",
    "RFC 9110 4.2.4, users in targets: not h11's concern": "a user in the target",
    "RFC 9110 9.1, methods: h11 accepts any token": "an unknown method",
    "RFC 9110 10.1.1, expectations: not h11's concern": "another expectation",
    "RFC 9112 6.1, codings of HTTP/1.0: h11 reads them": "chunked in 1.0",
    "RFC 3986 3.2, hosts: h11 does not check them": "a host with a path",
    "RFC 9110 4.2.1, ports: h11 does not check them": "a host with a port past 65535",
    "TRACE would hand secrets back: not h11's concern": "TRACE",
}


@pytest.mark.parametrize("case", STRICTER.values(), ids=STRICTER)
def test_heads_that_only_the_proxy_rejects(case):
    raw, _ = HOSTILE[case]
    assert parse_with_h11(raw) is not None
    refusal(raw)
