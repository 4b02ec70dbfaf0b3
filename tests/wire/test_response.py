from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.header_fields import DIAGNOSTICS
from omni_proxy.wire.request import MAX_HEAD_BYTES
from omni_proxy.wire.response import (
    Framing,
    Unchunker,
    UpstreamProtocolError,
    UpstreamResponse,
    find_response_head_end,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def read(head, *, to_head=False):
    response = UpstreamResponse()
    response.read_head(head, to_head=to_head)
    return response


def head(*fields, line=OK):
    return line + b"".join(field + b"\r\n" for field in fields) + b"\r\n"


@pytest.mark.parametrize("raw", [head(b"a: b"), CHUNKED, b"HTTP/1.0 404 Not Found\r\n\r\n"])
def test_the_end_of_a_head_is_found(raw):
    assert find_response_head_end(raw) == find_response_head_end(raw + b"body") == len(raw)
    assert not any(find_response_head_end(raw[:length]) for length in range(len(raw)))


@pytest.mark.parametrize(
    "raw", [b"SSH-2.0-OpenSSH\r\n", b"\x00", b"<html>", OK + b"a: b\r\n" * 20000, b"http/1.1 200"]
)
def test_bytes_that_cannot_become_a_response_are_an_error_at_once(raw):
    with pytest.raises(UpstreamProtocolError):
        find_response_head_end(raw)


GARBAGE = {
    "both lengths": head(b"content-length: 5", b"transfer-encoding: chunked"),
    "both, the other way": head(b"transfer-encoding: chunked", b"content-length: 5"),
    "two lengths": head(b"content-length: 5", b"content-length: 6"),
    "a list of lengths": head(b"content-length: 5, 5"),
    "a negative length": head(b"content-length: -5"),
    "an empty length": head(b"content-length:"),
    "a length that no integer of the machine holds": head(b"content-length: 9223372036854775808"),
    "another coding": head(b"transfer-encoding: gzip"),
    "a list of codings": head(b"transfer-encoding: gzip, chunked"),
    "two codings": head(b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
    "identity": head(b"transfer-encoding: identity"),
    "a folded line": head(b"a: b", b" c"),
    "a bare LF": head(b"a: b\nc: d"),
    "a bare CR": head(b"a: b\rc: d"),
    "a NUL in a value": head(b"a: \x00"),
    "a NUL in the reason": head(line=b"HTTP/1.1 200 O\x00K\r\n"),
    "a space in a name": head(b"a b: c"),
    "a status of two digits": head(line=b"HTTP/1.1 99 X\r\n"),
    "a status of four digits": head(line=b"HTTP/1.1 2000 X\r\n"),
    "a status past 599": head(line=b"HTTP/1.1 600 X\r\n"),
    "HTTP/2": head(line=b"HTTP/2.0 200 OK\r\n"),
    "HTTP/0.9": head(line=b"HTTP/0.9 200 OK\r\n"),
    "no status": head(line=b"HTTP/1.1 OK\r\n"),
}


@pytest.mark.parametrize("raw", GARBAGE.values(), ids=GARBAGE)
def test_an_ambiguous_head_is_an_error(raw):
    with pytest.raises(UpstreamProtocolError):
        read(raw)


@pytest.mark.parametrize(
    ("raw", "framing", "is_complete"),
    [
        (head(b"content-length: 5"), Framing.LENGTH, False),
        (head(b"Content-Length: 0"), Framing.LENGTH, True),
        (CHUNKED, Framing.CHUNKED, False),
        (head(b"Transfer-Encoding: Chunked "), Framing.CHUNKED, False),
        (head(), Framing.CLOSE, False),
        (head(b"content-length: 5", line=b"HTTP/1.1 304 Not Modified\r\n"), Framing.LENGTH, True),
        (head(line=b"HTTP/1.1 204 No Content\r\n"), Framing.CLOSE, True),
        (head(line=b"HTTP/1.1 100 Continue\r\n"), Framing.CLOSE, True),
    ],
)
def test_the_framing_depends_on_the_fields(raw, framing, is_complete):
    response = read(raw)
    assert (response.framing, response.is_complete) == (framing, is_complete)


def test_a_response_to_head_has_no_body():
    response = read(head(b"content-length: 5"), to_head=True)
    assert response.is_complete
    assert response.lines == OK + b"content-length: 5\r\n"


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (head(b"content-length: 5"), True),
        (head(b"content-length: 0"), True),
        (CHUNKED, True),
        (head(line=b"HTTP/1.1 204 No Content\r\n"), True),
        (head(), False),
        (head(b"content-length: 5", b"Connection: Close"), False),
        (head(b"content-length: 0", b"connection: x, close"), False),
        (head(b"content-length: 5", line=b"HTTP/1.0 200 OK\r\n"), False),
        (head(b"content-length: 5", b"connection: keep-alive", line=b"HTTP/1.0 200 OK\r\n"), True),
    ],
)
def test_keep_alive_depends_on_the_worker_and_the_framing(raw, kept):
    assert read(raw).keep_alive is kept


def test_end_to_end_fields_keep_order_and_repetitions():
    raw = head(
        b"Set-Cookie: a", b"Connection: close, X-Hop", b"Keep-Alive: 5", b"set-cookie: b",
        b"x-hop: 1", b"Upgrade: h2", b"Trailer: t", b"TE: t", b"Proxy-Connection: close",
        b"Proxy-Authorization: x", b"Trailers: t",
        b"Content-Length: 0", b"X: \xe4",
    )  # fmt: skip
    lines = OK + b"Set-Cookie: a\r\nset-cookie: b\r\nContent-Length: 0\r\nX: \xe4\r\n"
    assert read(raw).lines == lines


def test_connection_cannot_remove_the_content_length():
    response = read(head(b"connection: content-length", b"content-length: 5"))
    assert response.lines == OK + b"content-length: 5\r\n"


def test_a_response_of_http_1_0_is_forwarded_as_1_1():
    assert read(head(line=b"HTTP/1.0 200 Fine\r\n")).lines == b"HTTP/1.1 200 Fine\r\n"


def test_an_event_stream_is_recognized_by_its_content_type():
    assert read(head(b"Content-Type: Text/Event-Stream; charset=utf-8")).sse
    assert not read(head(b"content-type: application/json")).sse


BODIES = {
    "length": (head(b"content-length: 11"), b"hello world"),
    "chunks": (CHUNKED, b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"),
    "chunks with a trailer": (CHUNKED, b"1\r\na\r\n0\r\nx: y\r\n\r\n"),
    "no chunk": (CHUNKED, b"0\r\n\r\n"),
}


@pytest.mark.parametrize(("raw", "body"), BODIES.values(), ids=BODIES)
def test_a_body_is_relayed_to_its_end_and_not_changed(raw, body):
    at_once = read(raw)
    assert (at_once.feed(body), at_once.is_complete, at_once.excess) == (body, True, False)
    by_byte = read(raw)
    for at in range(len(body)):
        assert not by_byte.is_complete
        assert by_byte.feed(body[at : at + 1]) == body[at : at + 1]
    assert (by_byte.is_complete, by_byte.excess) == (True, False)


def test_bytes_beyond_the_content_length_are_dropped_and_reported():
    response = read(head(b"content-length: 5"))
    assert response.feed(b"helloHTTP/1.1 200 OK\r\n\r\n") == b"hello"
    assert (response.is_complete, response.excess) == (True, True)


def test_another_response_after_the_last_chunk_is_an_error():
    with pytest.raises(UpstreamProtocolError, match="after the end"):
        read(CHUNKED).feed(b"0\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("stray", [b"\r\n", b"\n", b"\r\n\r\n"])
def test_empty_lines_after_the_last_chunk_are_dropped_and_reported(stray):
    response = read(CHUNKED)
    assert response.feed(b"1\r\na\r\n0\r\n\r\n" + stray) == b"1\r\na\r\n0\r\n\r\n"
    assert (response.is_complete, response.excess) == (True, True)


@pytest.mark.parametrize(
    "body", [b"x\r\n", b"5\nhello\n", b"5\r\nhelloX", b"-1\r\n", b"1 1\r\na\r\n"]
)
def test_invalid_chunks_are_an_error(body):
    with pytest.raises(UpstreamProtocolError):
        read(CHUNKED).feed(body)


def test_a_close_delimited_body_is_complete_only_at_the_close():
    response = read(head())
    assert response.feed(b"anything") == b"anything"
    assert not response.is_complete


@pytest.mark.parametrize(
    ("sent", "between"),
    [
        (b"", True),
        (b"5\r\nhello\r\n", True),
        (b"5\r\nhello\r\n5\r\nhe", False),
        (b"5\r\nhello", False),
        (b"5\r\nhello\r", False),
        (b"5\r\nhello\r\n1", False),
        (b"5\r\n", False),
        (b"3\r\nab", False),  # "0" would be the third byte of the chunk
        (b"0\r\n", False),
        (b"0\r\n\r\n", False),
    ],
)
def test_whether_the_relayed_bytes_end_between_chunks(sent, between):
    response = read(CHUNKED)
    if sent:
        response.feed(sent)
    assert response.is_between_chunks(sent) is between


@pytest.mark.parametrize(
    ("before", "invalid", "between"),
    [
        ([], b"xyz", True),
        ([], b"5\r\nhello\r\nxyz", True),
        ([b"5\r\nhello\r\n"], b"zz\r\nnot a chunk\r\n", True),
        ([b"5\r\nhello\r\n"], b"5\r\nhelloXX\r\n", True),
        ([b"5\r\nhello\r\n"], b"5\r\nhello\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n", True),
        ([b"5;a=b\r\nhello\r\n5\r\nhel", b"lo\r\nb\r\nhello hello\r\n"], b"\r\n", True),
        ([b"5\r\nhello\r\n5\r\nhe"], b"lolX", False),
        ([b"5\r\nhel"], b"loX", False),
        ([b"5\r\nhello"], b"XX\r\n", False),
        ([b"5\r\nhello\r"], b"X", False),
        ([b"5\r\nhello\r\n1"], b"xyz", False),
        ([b"5\r\nhello\r\n5\r\n"], b"hello\r\r", False),
        (
            [b"c\r\n", b"5\r\nhello\r\n"],
            b"5\r\n\r\r",
            False,
        ),  # part of the twelve bytes of the payload
        ([b"c\r\n5\r\nhello\r\n"], b"5\r\nhelloX", False),  # two bytes of the payload are missing
        ([b"3\r\n5\r\n\r\n"], b"xyz", True),  # the payload looks like a size
        ([b"ff\r\n" + b"x" * 200, b"x" * 50 + b"ff\r\nx\r\n5\r\nhello\r\n"], b"xyz", True),
        ([b"5\r\nhel", b"lo\r\n"], b"xyz", False),  # unknown: it might be part of a larger chunk
    ],
)
def test_whether_the_relayed_bytes_end_between_chunks_after_an_error(before, invalid, between):
    response = read(CHUNKED)
    for piece in before:
        response.feed(piece)
    with pytest.raises(UpstreamProtocolError):
        response.feed(invalid)
    assert response.is_between_chunks(before[-1] if before else b"") is between


PAYLOADS = st.lists(st.binary(min_size=1, max_size=20), max_size=5)
CUTS = st.lists(st.integers(0, 200), max_size=6)


def chunked(payloads):
    return (
        b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads) + b"0\r\n\r\n"
    )


def cut(body, cuts):
    bounds = sorted({0, len(body), *(at for at in cuts if at < len(body))})
    return [body[a:b] for a, b in pairwise(bounds)]


@given(PAYLOADS, CUTS)
def test_chunks_are_unchanged_and_have_the_payload_that_h11_reads(payloads, cuts):
    response, unchunker, relayed, payload = read(CHUNKED), Unchunker(), b"", b""
    for piece in cut(chunked(payloads), cuts):
        piece_to_relay = response.feed(piece)
        relayed += piece_to_relay
        payload += unchunker.feed(piece_to_relay)
    assert response.is_complete
    assert relayed == chunked(payloads)
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(CHUNKED + relayed)
    assert isinstance(reader.next_event(), h11.Response)
    expected = b""
    while isinstance(event := reader.next_event(), h11.Data):
        expected += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert payload == expected == b"".join(payloads)


def test_an_incomplete_head_of_the_maximum_size_is_no_error():
    assert find_response_head_end(OK.ljust(MAX_HEAD_BYTES, b"a")) == 0


def test_the_limit_counts_only_the_head():
    longest = OK.ljust(MAX_HEAD_BYTES - 4, b"a") + b"\r\n\r\n"
    assert find_response_head_end(longest + b"a body") == MAX_HEAD_BYTES
    with pytest.raises(UpstreamProtocolError, match="too large"):
        find_response_head_end(b"H" + longest + b"a body")


def test_an_upgrade_after_the_end_is_an_error():
    response = UpstreamResponse()
    response.read_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", to_head=False)
    after_end = b"HTTP/1.1 101 Switching\r\nupgrade: a\r\nconnection: upgrade\r\n\r\n"
    with pytest.raises(UpstreamProtocolError, match="after the end"):
        response.feed(b"0\r\n\r\n" + after_end)


@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_a_workers_fields_with_names_of_diagnostics_are_dropped(name):
    fields = [b"a: 1", name + b": spoofed", name.title() + b":", name.upper() + b": \t", b"b: 2"]
    response = read(head(*fields, b"content-length: 0"))
    assert response.lines == OK + b"a: 1\r\nb: 2\r\ncontent-length: 0\r\n"


def test_fields_with_names_similar_to_diagnostics_are_kept():
    fields = b"x-omni-instance: 1\r\nx-omni-weight: 2\r\nx-sglang-omni-worker-load: 3\r\n"
    assert read(OK + fields + b"\r\n").lines == OK + fields
