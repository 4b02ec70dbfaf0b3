import pytest

from tests.promises.support.clients import CHAT, post
from tests.promises.support.dataplane_fixture import run_dataplane

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"host: proxy\r\n"
LENGTH = b"content-length: 16\r\n"
BAD_HEADS = {
    "no request": (b"hello\r\n\r\n", 400),
    "a bare lf first": (b"\n" + LINE + HOST + b"\r\n", 400),
    "a bare cr first": (b"\r" + LINE + HOST + b"\r\n", 400),
    "an empty line with two crs": (b"\r\n\r\r\n" + LINE + HOST + b"\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), 400),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "http 3.7": (b"POST /v1/chat/completions HTTP/3.7\r\n" + HOST + b"\r\n", (400, 505)),
    "no version": (b"POST /v1/chat/completions\r\n" + HOST + b"\r\n", (400, 505)),
    "two spaces": (b"POST  /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "connect": (b"CONNECT proxy:443 HTTP/1.1\r\nhost: proxy:443\r\n\r\n", 405),
    "trace": (b"TRACE /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "target without slash": (b"POST v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "target of another host": (
        b"POST http://evil/v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 400,
    ),
    "control byte in target": (b"POST /v1/chat\x01 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "no host": (LINE + LENGTH + b"\r\n" + CHAT, 400),
    "two hosts": (LINE + HOST + b"host: other\r\n" + LENGTH + b"\r\n" + CHAT, 400),
    "host with a slash": (LINE + b"host: proxy/evil\r\n" + LENGTH + b"\r\n" + CHAT, 400),
    "bare line feeds": ((LINE + HOST + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + CHAT, 400),
    "folded field": (LINE + HOST + b"x-a: b\r\n c\r\n" + LENGTH + b"\r\n" + CHAT, 400),
    "space before colon": (LINE + HOST + b"content-length : 16\r\n\r\n" + CHAT, 400),
    "field without colon": (LINE + HOST + b"nonsense\r\n" + LENGTH + b"\r\n" + CHAT, 400),
    "field without name": (LINE + HOST + b": x\r\n" + LENGTH + b"\r\n" + CHAT, 400),
    "null byte in value": (LINE + HOST + b"x-a: b\x00c\r\n" + LENGTH + b"\r\n" + CHAT, 400),
    "bare return in value": (LINE + HOST + b"x-a: b\rc\r\n" + LENGTH + b"\r\n" + CHAT, 400),
    "length and chunked": (
        LINE + HOST + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400,
    ),
    "two lengths": (LINE + HOST + LENGTH + b"content-length: 17\r\n\r\n" + CHAT, 400),
    "the same length twice": (LINE + HOST + LENGTH + LENGTH + b"\r\n" + CHAT, 400),
    "negative length": (LINE + HOST + b"content-length: -1\r\n\r\n", 400),
    "length with a plus": (LINE + HOST + b"content-length: +16\r\n\r\n" + CHAT, 400),
    "length in hexadecimal": (LINE + HOST + b"content-length: 0x10\r\n\r\n" + CHAT, 400),
    "length list": (LINE + HOST + b"content-length: 16, 16\r\n\r\n" + CHAT, 400),
    "endless length": (LINE + HOST + b"content-length: " + b"9" * 40 + b"\r\n\r\n", 400),
    "chunked twice": (
        LINE + HOST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n", 400,
    ),
    "gzip, chunked": (LINE + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n", (400, 501)),
    "identity coding": (LINE + HOST + b"transfer-encoding: identity\r\n\r\n", (400, 501)),
    "chunked with http 1.0": (
        LINE.replace(b"1.1", b"1.0") + HOST + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400,
    ),
    "unknown expectation": (LINE + HOST + b"expect: a-miracle\r\n" + LENGTH + b"\r\n", 417),
    "long target": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
    "endless target": (b"GET /" + b"a" * 200_000, 414),
    "long head": (LINE + HOST + b"x-a: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    "endless head": (LINE + HOST + b"x-a: b\r\n" * 20_000, 431),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADS)
async def test_a_malformed_head_is_rejected_and_never_reaches_the_worker(name, worker):
    head, status = BAD_HEADS[name]
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(head)
        response = await client.answer("TRACE" if name == "trace" else "POST")
        assert response.status in (status if isinstance(status, tuple) else (status,))
        assert response.one("connection") == "close"
        assert b'"error":{"message":' in response.body
        assert await client.until_closed() == b""
        async with opened.client() as other:
            await other.send(post())
            assert (await other.answer()).status == 200
    assert len(worker.requests) == 1


async def test_bytes_after_a_malformed_head_are_not_parsed_as_a_request(worker):
    async with run_dataplane(worker) as opened, opened.client() as client:
        smuggled = LINE + HOST + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + post()
        await client.send(smuggled)
        assert (await client.answer()).status == 400
        assert await client.until_closed() == b""
    assert worker.requests == []


async def test_a_good_request_before_a_malformed_one_is_answered(worker):
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(post(), b"nonsense\r\n\r\n")
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 400
        assert await client.until_closed() == b""


async def test_an_incomplete_head_times_out_with_408(worker):
    timeouts = "[server.timeouts]\nclient_head_secs = 0.05"
    async with run_dataplane(worker, config=timeouts) as opened, opened.client() as client:
        await client.send(LINE + HOST)
        assert (await client.answer()).status == 408
        assert await client.until_closed() == b""
    assert worker.requests == []


async def test_a_connection_without_a_request_is_closed_without_a_response(worker):
    timeouts = "[server.timeouts]\nclient_idle_secs = 0.05"
    async with run_dataplane(worker, config=timeouts) as opened, opened.client() as client:
        assert await client.until_closed() == b""
    assert opened.log.records == []


async def test_a_head_may_arrive_byte_by_byte(worker):
    async with run_dataplane(worker) as opened, opened.client() as client:
        for byte in post():
            await client.send(bytes([byte]))
        assert (await client.answer()).status == 200
    assert worker.requests == [("POST /v1/chat/completions HTTP/1.1", CHAT)]


async def test_empty_lines_before_a_request_are_skipped(worker):
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(b"\r\n\r\n", post())
        assert (await client.answer()).status == 200
        await client.send(post() + b"\r\n", post())
        for _ in range(2):
            assert (await client.answer()).status == 200
        for byte in b"\r\n\r\n" + post():
            await client.send(bytes([byte]))
        assert (await client.answer()).status == 200
