import gzip
import json

import pytest

from tests.promises.support.clients import CHAT, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    answering,
    chunk,
    counted,
    fake_workers,
)


async def forwarded(worker, request):
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(request)
        assert (await client.answer()).status == 200
    call = worker.calls[0]
    return call.line, call.fields, call.body


async def response_to(script, request=None):
    async with dataplane_and_client(script) as (_, client):
        await client.send(request or post())
        return await client.answer()


@pytest.mark.parametrize(
    "body",
    [
        b'  {"messages" :[ ],\t"model":"m" }\r\n',
        b'{"messages": [], "a": 1, "a": 2, "temperature": 1.0e0, "top_p": 0.10000000000000000001}',
        '{"messages": [{"role": "user", "content": "Grüße 🙂 \\u00e4 \\ud83d\\ude42"}]}'.encode(),
        b'{"messages": [], "seed": 123456789012345678901234567890}',
        b'{"messages": [], "x": NaN}',
        b"\xff\xfe" + '{"messages": []}'.encode("utf-16-le"),
    ],
    ids=["spaces", "duplicates", "unicode", "big number", "nan", "utf-16"],
)
async def test_a_body_is_forwarded_byte_for_byte(worker, body):
    assert (await forwarded(worker, post(body)))[2] == body


async def test_a_binary_body_is_forwarded_byte_for_byte(worker):
    body = bytes(range(256)) * 500
    kind = "content-type: application/octet-stream"
    assert (await forwarded(worker, post(body, kind=kind)))[2] == body


async def test_a_chunked_request_reaches_the_worker_with_a_length(worker):
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ntrailer: x-t\r\n"
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        b"1;ext=1\r\n{\r\n00f\r\n" + CHAT[1:] + b"\r\n0\r\nx-t: v\r\n\r\n"
    )
    assert len(CHAT) == 16
    _, fields, body = await forwarded(worker, request)
    assert body == CHAT
    assert ("content-length", "16") in fields
    assert not {"transfer-encoding", "trailer", "x-t"} & {name for name, _ in fields}


async def test_path_and_query_are_forwarded_unchanged(worker):
    path = "/v1/chat/completions?a=1&a=2&b=%2F%c3%a4&c=+&d"
    line, _, _ = await forwarded(worker, post(path=path))
    assert line == f"POST {path} HTTP/1.1"


async def test_the_clients_fields_are_forwarded_and_repeated_ones_stay_repeated(worker):
    sent = [
        "Authorization: Bearer secret", "Cookie: a=1", "Cookie: b=2", "X-Odd:  two  spaces ",
        "Accept-Encoding: zstd", "X-Repeated: one", "x-repeated: two", "X-Empty:",
    ]  # fmt: skip
    _, fields, _ = await forwarded(worker, post(CHAT, *sent))
    expected = [
        ("authorization", "Bearer secret"), ("cookie", "a=1"), ("cookie", "b=2"),
        ("x-odd", "two  spaces"), ("accept-encoding", "zstd"), ("x-repeated", "one"),
        ("x-repeated", "two"), ("x-empty", ""),
    ]  # fmt: skip
    names = {name for name, _ in expected}
    assert [field for field in fields if field[0] in names] == expected


async def test_host_names_the_worker_and_no_fields_are_added(worker):
    _, fields, _ = await forwarded(worker, post())
    assert sorted(fields) == [
        ("content-length", str(len(CHAT))),
        ("content-type", "application/json"),
        ("host", worker.url.removeprefix("http://")),
    ]


async def test_hop_by_hop_fields_of_a_request_are_not_forwarded(worker):
    sent = [
        "Connection: keep-alive, X-Nominated , x-other", "X-Nominated: 1", "x-OTHER: 2",
        "Keep-Alive: timeout=5", "Proxy-Authorization: Basic eA==", "Proxy-Connection: keep-alive",
        "TE: trailers", "Trailer: x-t", "Upgrade: h2c", "X-Stays: 3",
    ]  # fmt: skip
    _, fields, _ = await forwarded(worker, post(CHAT, *sent))
    names = {name for name, _ in fields}
    assert names == {"host", "content-type", "content-length", "x-stays"}


async def test_routing_hint_fields_are_stripped(worker):
    hints = ["X-SGLang-Omni-Route-Model: m", "x-sglang-omni-route-capabilities: chat"]
    kind = "content-type: application/octet-stream"
    _, fields, _ = await forwarded(worker, post(b"?", *hints, kind=kind))
    assert not [name for name, _ in fields if "route" in name]


@pytest.mark.parametrize("name", ["x-sglang-omni-request-id", "x-request-id", "x-correlation-id"])
async def test_the_clients_request_id_is_forwarded_and_returned(worker, name):
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(post(CHAT, f"{name}: mine-1"))
        answer = await client.answer()
    assert answer.one("x-sglang-omni-request-id") == "mine-1"
    assert (name, "mine-1") in worker.calls[0].fields


async def test_a_request_id_of_the_body_cannot_inject_headers(worker):
    body = json.dumps({"messages": [], "request_id": "a\r\nset-cookie: x=1"}).encode()
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(post(body))
        answer = await client.answer()
    assert answer.all("set-cookie") == []
    assert len(answer.one("x-sglang-omni-request-id")) == 32


async def test_every_response_names_its_worker(worker):
    async with run_dataplane(worker) as opened, opened.client() as client:
        await client.send(post())
        answer = await client.answer()
        assert answer.one("x-sglang-omni-worker") == opened.fleet.workers[0].id
    assert answer.one("x-sglang-omni-route-attempt") == "1"
    assert len(answer.one("x-sglang-omni-request-id")) == 32


async def test_a_unary_response_keeps_its_length_and_its_bytes():
    body = b' {"a" : 1.0}\n'
    answer = await response_to(answering(counted(body, "content-type: application/json")))
    assert answer.body == body
    assert answer.one("content-length") == str(len(body))
    assert answer.one("transfer-encoding") is None


async def test_a_compressed_response_is_relayed_unchanged():
    packed = gzip.compress(b'{"a": 1}')
    answer = await response_to(answering(counted(packed, "Content-Encoding: gzip")))
    assert answer.body == packed
    assert answer.one("content-encoding") == "gzip"


async def test_a_response_keeps_repeated_fields_and_loses_hop_by_hop_fields():
    sent = [
        "Set-Cookie: a=1", "Set-Cookie: b=2", "Date: Sat, 21 Nov 2026 00:00:00 GMT",
        "Server: them", "Connection: keep-alive, X-Nominated", "X-Nominated: 1",
        "Keep-Alive: timeout=5", "Proxy-Authenticate: Basic", "Upgrade: h2c", "X-Stays: 3",
    ]  # fmt: skip
    answer = await response_to(answering(counted(b"{}", *sent)))
    assert answer.all("set-cookie") == ["a=1", "b=2"]
    assert (answer.one("server"), answer.one("x-stays")) == ("them", "3")
    assert answer.one("date") == "Sat, 21 Nov 2026 00:00:00 GMT"
    hop_by_hop = {"connection", "x-nominated", "keep-alive", "proxy-authenticate", "upgrade"}
    assert not hop_by_hop & {name for name, _ in answer.fields}


async def test_a_chunked_response_keeps_its_chunks_extensions_and_trailers():
    wire = b"5;a=b\r\nhello\r\n" + chunk(b" world") + b"0\r\nx-digest: 1\r\n\r\n"
    async with dataplane_and_client(answering(CHUNKED_HEAD, wire)) as (_, client):
        await client.send(post())
        await client.until(b"\r\n\r\n")
        assert await client.until(wire) == wire


async def test_a_workers_status_line_keeps_its_reason_phrase():
    async with (
        fake_workers(answering(counted(b"", status="418 I'm a teapot"))) as fakes,
        run_dataplane(*fakes) as opened,
        opened.client() as client,
    ):
        await client.send(post())
        assert await client.until(b"\r\n") == b"HTTP/1.1 418 I'm a teapot\r\n"


async def test_heads_that_differ_only_in_values_are_not_confused():
    async def script(call):
        fields = dict(call.fields)
        reply = json.dumps(
            [fields.get("x-request-id"), fields.get("authorization"), len(call.body)]
        )
        await call.send(counted(reply.encode(), f"x-len: {len(call.body)}"))

    async with dataplane_and_client(script) as (_, client):
        for number in range(12):
            body = b'{"messages": [], "n": %b}' % (b"1" * (number + 1))
            user = f"authorization: Bearer u{number % 3}"
            await client.send(post(body, f"x-request-id: r{number}", user))
            answer = await client.answer()
            assert json.loads(answer.body) == [f"r{number}", f"Bearer u{number % 3}", len(body)]
            assert answer.one("x-len") == str(len(body))
            assert answer.one("x-sglang-omni-request-id") == f"r{number}"


async def test_a_workers_configured_key_replaces_the_clients_key(worker, monkeypatch):
    monkeypatch.setenv("WORKER_KEY", "for-them")
    config = f'[[workers]]\nurl = "{worker.url}"\napi_key_env = "WORKER_KEY"'
    async with run_dataplane(config=config) as opened, opened.client() as client:
        await client.send(post(CHAT, "Authorization: Bearer mine"))
        assert (await client.answer()).status == 200
    values = [value for name, value in worker.calls[0].fields if name == "authorization"]
    assert values == ["Bearer for-them"]


async def test_a_large_stream_is_relayed_byte_for_byte():
    payload = bytes(range(256)) * 4096

    async def script(call):
        await call.send(CHUNKED_HEAD)
        for at in range(0, len(payload), 5000):
            await call.send(chunk(payload[at : at + 5000]))
        await call.send(LAST_CHUNK)

    assert (await response_to(script)).body == payload
