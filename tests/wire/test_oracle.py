"""Compares how the proxy and h11 parse complete requests, valid and damaged.

The tables below explain the differences. A difference that no row explains fails a test, and so
does a row without a difference.
"""

import re

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.wire.chunked import ChunkedBody
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import CHUNKED, MAX_HEAD_BYTES, find_head_end, parse_request_head
from tests.example_counts import examples

LIMIT = 1 << 20
UNFINISHED = "unfinished"


def get(*fields, line=b"GET / HTTP/1.1\r\n", host=b"Host: proxy\r\n", body=b""):
    return line + host + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


def chunked(body):
    return get(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.1\r\n", body=body)


END = b"0\r\n\r\n"
BOTH = (b"Content-Length: 5", b"Transfer-Encoding: chunked")
# Errors of the proxy for bytes that h11 accepts or considers incomplete; the reason; an example.
STRICTER = {
    "the Host is not valid": (
        "RFC 9112 3.2: h11 does not check it", get(host=b"Host: a@b\r\n"),
    ),
    "malformed request head: Invalid method": (
        "h11 accepts any token", get(line=b"FETCH / HTTP/1.1\r\n"),
    ),
    "malformed request head: Expected space after method": (
        "the same for a method that begins like another", get(line=b"POST# / HTTP/1.1\r\n"),
    ),
    "only 100-continue can be expected": ("RFC 9110 10.1.1: h11 ignores it", get(b"Expect: a")),
    "the target names another host": (
        "RFC 9112 3.2.2: h11 leaves it to its user", get(line=b"GET http://a/ HTTP/1.1\r\n"),
    ),
    "the request target must begin": (
        "RFC 9112 3.2: h11 leaves it to its user", get(line=b"GET ht://proxy/ HTTP/1.1\r\n"),
    ),
    "malformed request head: Unexpected char in url": (
        "RFC 9112 3.2: h11 leaves it to its user", get(line=b"GET htt//proxy HTTP/1.1\r\n"),
    ),
    "malformed request head: Unexpected start char in url": (
        "RFC 9112 3.2: h11 leaves it to its user", get(line=b"GET 1/ HTTP/1.1\r\n"),
    ),
    "malformed request head: Invalid characters in url": (
        "RFC 9112 3.2: h11 leaves it to its user", get(line=b"GET abc HTTP/1.1\r\n"),
    ),
    "malformed request head: Double @ in url": (
        "RFC 3986 3.2: h11 does not read the authority", get(line=b"GET http://@@a/ HTTP/1.1\r\n"),
    ),
    "the request line is not METHOD TARGET": (
        "RFC 9112 3.2: h11 accepts fragments", get(line=b"GET /#a HTTP/1.1\r\n"),
    ),
    "malformed request head: Missing expected CR": (
        "RFC 9112 2.2: h11 accepts a bare LF, as recipients may", get(b"a: b\nc: d"),
    ),
    "malformed request head: Expected CRLF after version": (
        "RFC 9112 2.2: a bare LF again", get(line=b"GET / HTTP/1.1\n"),
    ),
    "lines must end with CRLF": ("a bare LF in an incomplete head", b"GET / HTTP/1.1\n"),
    "malformed request head: Unexpected whitespace after header value": (
        "RFC 9112 5.2: h11 unfolds lines", get(b"a: b", b"\tc: d"),
    ),
    "malformed request head: Invalid header value char": (
        "RFC 9110 5.5: h11 accepts controls other than NUL, CR and LF", get(b"a: \x7f"),
    ),
    "malformed request head: Invalid header field char": (
        "a line that is only an LF, where h11 sees the end", get(line=b"GET / HTTP/1.0\r\n\n"),
    ),
    "malformed request head: Invalid HTTP version": (
        "h11 accepts any version number", get(line=b"GET / HTTP/1.2\r\n"),
    ),
    "HTTP/": ("the same for a version that llhttp knows", get(line=b"GET / HTTP/2.0\r\n")),
    "malformed request head: Content-Length can't be": (
        "RFC 9112 6.3: h11 prefers the coding", get(*BOTH[::-1], body=END),
    ),
    "malformed request head: Transfer-Encoding can't be": (
        "RFC 9112 6.3: h11 prefers the coding", get(*BOTH, body=END),
    ),
    "malformed request head: Duplicate Content-Length": (
        "RFC 9112 6.3: h11 merges equal lengths", get(BOTH[0], BOTH[0], body=b"hello"),
    ),
    "malformed request head: Invalid character in Content-Length": (
        "RFC 9112 6.3: h11 merges equal lengths", get(b"Content-Length: 5, 5", body=b"hello"),
    ),
    "malformed request head: Request has invalid `Transfer-Encoding`": (
        "a tab after the coding, which llhttp does not trim", get(BOTH[1] + b"\t", body=END),
    ),
    "HTTP/1.0 has no transfer-encoding": (
        "RFC 9112 6.1 calls such framing faulty",
        get(BOTH[1], line=b"GET / HTTP/1.0\r\n", body=END),
    ),
    "CONNECT is not served": (
        "h11 leaves it to its user", get(line=b"CONNECT a:1 HTTP/1.1\r\n", host=b"Host: a:1\r\n"),
    ),
    "TRACE is not served": ("h11 leaves it to its user", get(line=b"TRACE / HTTP/1.1\r\n")),
    "a chunk's size line must end with CRLF": (
        "a bare LF, which h11 accepts in a trailer", chunked(b"0\r\na: b\n\r\n"),
    ),
    "a chunk size is not a plain": (
        "controls in an extension, which h11 accepts", chunked(b"1;a=\x00\r\na\r\n" + END),
    ),
    "a trailer line is not a valid field": (
        "h11 waits for the end, or unfolds the line", chunked(b"0\r\na: b\r\n c\r\n\r\n"),
    ),
}  # fmt: skip
DROPPED = "in a trailer, which the proxy drops"
# Errors of h11 for bytes that the proxy accepts. The proxy does not forward these bytes.
LOOSER = {
    "bad Content-Length": (DROPPED, chunked(b"0\r\nContent-Length: x\r\n\r\n")),
    "conflicting Content-Length": (DROPPED, chunked(b"0\r\nContent-Length: 5, 6\r\n\r\n")),
    "Only Transfer-Encoding: chunked": (DROPPED, chunked(b"0\r\nTransfer-Encoding: a\r\n\r\n")),
    "multiple Transfer-Encoding": (
        DROPPED, chunked(b"0\r\n" + (BOTH[1] + b"\r\n") * 2 + b"\r\n"),
    ),
    "illegal chunk header": (
        "RFC 9112 7.1.1: whitespace before an extension is valid", chunked(b"0 ;a\r\n\r\n"),
    ),
}  # fmt: skip
# Errors that h11 raises earlier: the proxy waits for more bytes, or for a timeout.
LATER = {
    "illegal request line": ("a control byte at the very beginning", b"\x00"),
    "malformed chunk footer": ("one of the two bytes after a chunk", chunked(b"1\r\nab")),
}


def parse(raw):
    """Method, target, payload and the following bytes; or UNFINISHED, or an error message."""
    buffer = raw.lstrip(b"\r\n")
    try:
        end = find_head_end(buffer)
        if not end:
            return UNFINISHED
        head, rest = parse_request_head(buffer[:end]), buffer[end:]
        if head.length == CHUNKED:
            body = ChunkedBody(LIMIT)
            body.feed(rest)
            if not body.is_complete:
                return UNFINISHED
            return head.method, head.target, b"".join(body.payload), body.rest
    except HttpError as refusal:
        return refusal.message
    if len(rest) < head.length:
        return UNFINISHED
    return head.method, head.target, rest[: head.length], rest[head.length :]


def parse_with_h11(raw):
    """As `parse`."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=2 * MAX_HEAD_BYTES)
    reader.receive_data(raw.lstrip(b"\r\n"))
    payload, request = b"", None
    try:
        while True:
            event = reader.next_event()
            if event is h11.NEED_DATA:
                return UNFINISHED
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                payload += bytes(event.data)
            else:
                break
    except h11.RemoteProtocolError as error:
        return str(error)
    if request is None:
        return UNFINISHED
    target = re.sub(rb"(?i)\Ahttps?://[^/?]*", b"", request.target)
    if not target.startswith((b"/", b"*")):
        target = b"/" + target
    return request.method, target, payload, reader.trailing_data[0]


def difference(raw):
    """None, or the table that has to explain the difference, and the error message."""
    result, expected = parse(raw), parse_with_h11(raw)
    if result == expected or (_is_error(expected) and _is_error(result)):
        return None
    if _is_error(result):
        return STRICTER, result
    assert isinstance(expected, str), f"parsed differently: {result} and {expected} of {raw}"
    return (LATER if result == UNFINISHED else LOOSER), expected


def _is_error(result):
    return isinstance(result, str) and result != UNFINISHED


def explained(raw):
    """The row that explains the difference; None if there is no difference."""
    found = difference(raw)
    if found is None:
        return None
    table, message = found
    row = max((row for row in table if message.startswith(row)), key=len, default=None)
    assert row is not None, f"no row explains {message!r} of {raw}"
    return row


REQUESTS = [
    b"POST /v1/chat HTTP/1.1\r\nHost: proxy\r\nContent-Length: 5\r\nA: b\r\n\r\nhelloGET / HTTP/1.1",
    b"POST /v1?x=1 HTTP/1.1\r\nhost: proxy:80\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    b'3;ext="a"\r\nabc\r\n0\r\nTrailer: x\r\n\r\nNEXT',
    b"GET http://proxy/ HTTP/1.0\r\nHost: proxy\r\nConnection: keep-alive, te\r\nTE: a\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: [::1]:80\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
    b"\r\nHEAD /a%20b HTTP/1.1\r\nHost:\r\nUpgrade: a\r\nConnection: Upgrade\r\nX-Id:  1 \r\n\r\n",
]
TOKENS = [
    b"\r", b"\n", b"\r\n", b"\0", b" ", b"\t", b":", b",", b";", b"\x7f", b"\xff", b"0", b"+", b"-",
    b"x", b"A", b"\x0b", b"#", b"@", b'"', b"/", b"F", b"1", b"chunked", b"\r\nContent-Length: 5",
    b"\r\nTransfer-Encoding: chunked", b"\r\nHost: proxy", b"\r\n ", b"HTTP/1.1", b"HTTP/1.0",
    b"\r\nContent-Length: 5, 5", b"TRACE", b"CONNECT", b"\r\nContent-Length: ",
]  # fmt: skip
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "replace", "delete"]),
        st.integers(0, 200),
        st.sampled_from(TOKENS) | st.binary(min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=3,
)


def damaged(raw, edits):
    for kind, at, token in edits:
        at %= len(raw) + 1
        cut = {"insert": 0, "replace": len(token), "delete": 2}[kind]
        raw = raw[:at] + (b"" if kind == "delete" else token) + raw[at + cut :]
    return raw


@pytest.mark.parametrize("raw", REQUESTS)
def test_valid_requests_are_parsed_as_by_h11(raw):
    assert isinstance(parse(raw), tuple)
    assert difference(raw) is None


@settings(max_examples=examples(2000))
@given(st.sampled_from(REQUESTS), EDITS)
def test_every_difference_for_a_damaged_request_is_explained(raw, edits):
    explained(damaged(raw, edits))


@given(st.sampled_from(REQUESTS), st.integers(0, 200))
def test_both_wait_for_the_rest_of_a_request(raw, at):
    explained(raw[:at])


@pytest.mark.parametrize("table", [STRICTER, LOOSER, LATER], ids=["stricter", "looser", "later"])
def test_every_row_has_a_difference(table):
    for row, (_, raw) in table.items():
        assert difference(raw) is not None, row
        found, _ = difference(raw)
        assert (found is table, explained(raw)) == (True, row)
