import struct

import pytest
import trio

from tests.promises.support.clients import CHAT, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import PATIENCE_SECS, answering, counted, fake_workers

ANSWER = answering(counted(b"{}"))
BALANCED = "[server]\nproxy_protocol = true\nforwarded = 'append'\n"
V1 = b"PROXY TCP4 203.0.113.7 10.0.0.1 4711 443\r\n"
V2 = (
    b"\r\n\r\n\x00\r\nQUIT\n\x21\x11" + struct.pack("!H", 12)
    + bytes((203, 0, 113, 7, 10, 0, 0, 1)) + struct.pack("!HH", 4711, 443)
)  # fmt: skip


def forwarded_fields(worker, *names):
    """These fields of the last request that the worker received."""
    return [(name, value) for name, value in worker.calls[-1].fields if name in names]


SENT = ("x-forwarded-for: 8.8.8.8", "x-forwarded-proto: https", "via: 1.1 cdn")
FORWARDED_NAMES = ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "via")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "off",
            [("x-forwarded-for", "8.8.8.8"), ("x-forwarded-proto", "https"), ("via", "1.1 cdn")],
        ),
        (
            "append",
            [("x-forwarded-for", "8.8.8.8"), ("x-forwarded-proto", "https"), ("via", "1.1 cdn"),
             ("x-forwarded-host", "proxy"), ("via", "1.1 omni-proxy"),
             ("x-forwarded-for", "127.0.0.1")],
        ),
        (
            "replace",
            [("via", "1.1 cdn"), ("x-forwarded-proto", "http"), ("x-forwarded-host", "proxy"),
             ("via", "1.1 omni-proxy"), ("x-forwarded-for", "127.0.0.1")],
        ),
    ],
)  # fmt: skip
async def test_a_worker_gets_forwarded_headers_as_configured(mode, expected):
    config = f"[server]\nforwarded = '{mode}'"
    async with dataplane_and_client(ANSWER, config=config) as (opened, client):
        for _ in range(3):  # the later ones with a cached head
            await client.send(post(CHAT, *SENT))
            assert (await client.answer()).status == 200
            assert forwarded_fields(opened.workers[0], *FORWARDED_NAMES) == expected


async def test_a_reload_of_the_mode_applies_to_open_connections():
    async with dataplane_and_client(ANSWER) as (opened, client):
        for mode, count in (("off", 0), ("append", 1), ("off", 0)):
            opened.reload(f"[server]\nforwarded = '{mode}'")
            await client.send(post())
            assert (await client.answer()).status == 200
            assert len(forwarded_fields(opened.workers[0], "x-forwarded-for")) == count


@pytest.mark.parametrize("sent", [None, "mine"])
async def test_a_request_id_reaches_the_worker_the_client_and_the_log(sent):
    config = "[server]\nrequest_id_header = 'X-Trace'"
    script = answering(counted(b"{}", "x-trace: the worker's own"))
    async with dataplane_and_client(script, config=config) as (opened, client):
        for _ in range(2):
            await client.send(post(CHAT, *([f"x-trace: {sent}"] if sent else [])))
            answer = await client.answer()
            ((_, request_id),) = forwarded_fields(opened.workers[0], "x-trace")
            assert answer.all("x-trace") == [request_id]
            assert answer.one("x-sglang-omni-request-id") == request_id
            assert opened.last["request_id"] == request_id
            assert request_id == sent or len(request_id) == 32


async def test_local_replies_have_a_request_id_too():
    config = "[server]\nrequest_id_header = 'x-request-id'"
    async with dataplane_and_client(ANSWER, config=config) as (_, client):
        await client.send(post(b"no json", "x-request-id: mine"))
        answer = await client.answer()
        assert (answer.status, answer.one("x-request-id")) == (400, "mine")
        await client.send(b"nonsense\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, len(answer.one("x-request-id"))) == (400, 32)


@pytest.mark.parametrize("proxy_header", [V1, V2], ids=["v1", "v2"])
async def test_the_client_address_is_that_of_the_proxy_protocol_header(proxy_header):
    async with dataplane_and_client(ANSWER, config=BALANCED) as (opened, client):
        await client.send(proxy_header + post())
        assert (await client.answer()).status == 200
        await client.send(post())  # once per connection
        assert (await client.answer()).status == 200
        assert [line["client"] for line in opened.log.records] == ["203.0.113.7:4711"] * 2
        assert forwarded_fields(opened.workers[0], "x-forwarded-for") == [
            ("x-forwarded-for", "203.0.113.7")
        ]


@pytest.mark.parametrize("proxy_header", [V1, V2], ids=["v1", "v2"])
async def test_a_proxy_protocol_header_may_arrive_byte_by_byte(proxy_header):
    async with dataplane_and_client(ANSWER, config=BALANCED) as (opened, client):
        for byte in proxy_header + post():
            await client.send(bytes([byte]))
        assert (await client.answer()).status == 200
        assert opened.last["client"] == "203.0.113.7:4711"


async def test_a_proxy_protocol_header_without_an_address_keeps_the_peers():
    async with dataplane_and_client(ANSWER, config=BALANCED) as (opened, client):
        await client.send(b"PROXY UNKNOWN\r\n" + post())
        assert (await client.answer()).status == 200
        assert opened.last["client"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    "sent", [post(), b"PROXY TCP4 nonsense\r\n" + post(), V2[:12] + b"\x99" + V2[13:], V1[:20]]
)
async def test_a_connection_without_a_valid_proxy_protocol_header_is_closed_silently(sent):
    config = BALANCED + "[server.timeouts]\nclient_head_secs = 0.1"
    async with dataplane_and_client(ANSWER, config=config) as (opened, client):
        await client.send(sent)
        assert await client.until_closed() == b""
        assert not opened.log.records
        assert opened.workers[0].requests == []


async def test_status_counts_connections_with_an_invalid_proxy_protocol_header():
    async with fake_workers(ANSWER) as fakes, run_dataplane(*fakes, config=BALANCED) as opened:
        for sent in (b"PROXY TCP4 nonsense\r\n", V1 + post(), post()):
            async with opened.client() as client:
                await client.send(sent)
                if sent.startswith(V1):
                    assert (await client.answer()).status == 200
                else:
                    assert await client.until_closed() == b""
        status = opened.dataplane.status()
        assert status["failed_proxy_headers"] == 2
        assert status["failed_proxy_introductions"] == 2  # the old name, for one release


async def test_a_disconnect_within_the_proxy_protocol_header_leaves_nothing():
    async with fake_workers(ANSWER) as fakes, run_dataplane(*fakes, config=BALANCED) as opened:
        async with opened.client() as client:
            await client.send(V1[:20])
        with trio.fail_after(PATIENCE_SECS):
            await opened.dataplane.drained()
        assert not opened.log.records


async def test_with_proxy_protocol_off_its_header_is_a_malformed_head():
    async with dataplane_and_client(ANSWER) as (_, client):
        await client.send(V1 + post())
        assert (await client.answer()).status == 400
