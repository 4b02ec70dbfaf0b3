"""TLS at the listener: handshakes, certificates, streams and shutdown."""

import os
import shutil
import ssl
import warnings
from contextlib import asynccontextmanager

import pytest
import trio

from omni_proxy.config.parse import ConfigError
from omni_proxy.dataplane.downstream import tls_termination
from tests.dataplane.loop_script import until
from tests.promises.support.clients import CHAT, Truncated, client_of, post
from tests.promises.support.dataplane_fixture import configured, run_dataplane
from tests.promises.support.fakes import (
    CHUNKED_HEAD,
    answering,
    chunk,
    counted,
    fake_workers,
    hanging_up_after,
    silent,
)
from tests.promises.support.tls_helpers import (
    FILES,
    TwoEvents,
    client_context,
    listening,
    secure_client,
)


@asynccontextmanager
async def tls_dataplane(*scripts, config=None):
    async with (
        fake_workers(*scripts) as workers,
        run_dataplane(*workers, config=listening() if config is None else config) as opened,
    ):
        opened.workers = workers
        yield opened


async def test_requests_of_one_connection_are_answered_in_turn():
    async with (
        tls_dataplane(answering(counted(b"{}"))) as opened,
        secure_client(opened.address) as client,
    ):
        assert client.secure.selected_alpn_protocol() is None  # the client offered none
        for _ in range(3):
            await client.send(post())
            assert (await client.answer()).status == 200
        await client.send(post(), post())
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
    assert [body for _, body in opened.workers[0].requests] == [CHAT] * 5


async def test_requests_that_repeat_a_head_take_the_fast_path():
    on_fast_path = []  # for each request that a worker has received

    async def answer(call):
        (connection,) = opened.dataplane.loop.tasks
        on_fast_path.append(connection.client.task is connection.fast_path is not None)
        await call.send(counted(b"{}"))

    async with tls_dataplane(answer) as opened, secure_client(opened.address) as client:
        for _ in range(6):
            await client.send(post())
            assert (await client.answer()).status == 200
    assert not on_fast_path[0]  # it fills the cache of the fast path
    assert on_fast_path[-2:] == [True, True]
    assert [body for _, body in opened.workers[0].requests] == [CHAT] * 6


async def test_alpn_selects_http_1_1():
    context = client_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with (
        tls_dataplane(answering(counted(b"{}"))) as opened,
        secure_client(opened.address, context) as client,
    ):
        assert client.secure.selected_alpn_protocol() == "http/1.1"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_bytes_of_any_size_pass_unchanged_both_ways(version):
    body = b'{"messages": [], "x": "%b"}' % (bytes(range(35, 91)) * 20_000).replace(b"\\", b"")
    reply = os.urandom(700_000)
    context = client_context()
    context.maximum_version = version
    async with (
        tls_dataplane(answering(counted(reply))) as opened,
        secure_client(opened.address, context) as client,
    ):
        assert client.secure.version() == version.name.replace("v1_", "v1.")
        for _ in range(2):
            await client.send(post(body))
            assert (await client.answer()).body == reply
    assert [received for _, received in opened.workers[0].requests] == [body] * 2


async def test_events_of_a_stream_arrive_one_by_one():
    events = TwoEvents()
    async with tls_dataplane(events) as opened, secure_client(opened.address) as client:
        await events.relayed_to(client)


async def test_versions_before_tls_1_2_are_rejected():
    context = client_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    async with tls_dataplane(answering(counted(b"{}"))) as opened:
        with pytest.raises(trio.BrokenResourceError):
            async with secure_client(opened.address, context):
                pass
        await until(lambda: opened.dataplane.services.totals.failed_handshakes == 1)


async def test_a_client_that_reads_slowly_gets_the_whole_response():
    reply = os.urandom(6_000_000)
    async with (
        tls_dataplane(answering(counted(reply))) as opened,
        secure_client(opened.address) as client,
    ):
        await client.send(post())
        await until(lambda: any(t.phase == "client" for t in opened.dataplane.loop.tasks))
        assert (await client.answer()).body == reply


async def test_a_client_that_stops_reading_is_disconnected():
    async def endless(call):
        await call.send(CHUNKED_HEAD)
        while True:
            await call.send(chunk(bytes(65536)))

    config = listening() + "[server.timeouts]\nidle_secs = 0.2\n"
    async with (
        tls_dataplane(endless, config=config) as opened,
        secure_client(opened.address) as client,
    ):
        await client.send(post())
        await until(lambda: opened.dataplane.services.totals.ended["client_stalled"] == 1)
        with pytest.raises(Truncated):
            await client.answer()


async def test_a_truncated_response_is_detected_by_the_client():
    async with (
        tls_dataplane(hanging_up_after(counted(b"x" * 10)[:-4])) as opened,
        secure_client(opened.address) as client,
    ):
        await client.send(post())
        with pytest.raises(Truncated):
            await client.answer()


async def test_the_end_of_a_connection_sends_close_notify():
    async with (
        tls_dataplane(answering(counted(b"{}"))) as opened,
        # An unannounced end is an error.
        secure_client(opened.address, https_compatible=False) as client,
    ):
        await client.send(post(CHAT, "connection: close"))
        assert (await client.answer()).one("connection") == "close"
        assert await client.receive() == b""


@pytest.mark.parametrize("close_notify", [True, False])
async def test_a_client_that_disconnects_frees_its_worker(close_notify):
    received, left = trio.Event(), trio.Event()

    async def script(call):
        received.set()
        await call.until_left()
        left.set()

    async with tls_dataplane(script) as opened, secure_client(opened.address) as client:
        await client.send(post())
        await received.wait()
        if close_notify:
            await client.secure.aclose()
        else:
            client.close()
        await left.wait()
        await until(lambda: opened.dataplane.services.totals.ended["client_disconnected"] == 1)


async def test_a_client_that_half_closes_is_served_if_the_configuration_allows_it():
    released = trio.Event()

    async def later(call):
        await released.wait()
        await call.send(counted(b"{}"))

    config = listening(half_close="'answer'")
    async with (
        tls_dataplane(later, config=config) as opened,
        secure_client(opened.address) as client,
    ):
        await client.send(post())
        await until(lambda: opened.workers[0].calls)
        client.stop_sending()
        released.set()
        assert (await client.answer()).status == 200


async def test_plain_http_on_the_tls_port_gets_a_hint():
    async with tls_dataplane(silent) as opened, client_of(opened.address) as client:
        await client.send(post())
        response = await client.answer()
        assert (response.status, response.one("connection")) == (400, "close")
        assert b"plain_http_on_tls_port" in response.body
        assert await client.until_closed() == b""
    assert opened.workers[0].requests == []


async def test_a_disconnect_during_the_plain_http_error_is_not_a_failure():
    async with tls_dataplane(silent) as opened, client_of(opened.address) as client:
        await client.send(post())
        await client.answer()
        client.reset()
        await until(lambda: not opened.dataplane.loop.tasks)
    assert opened.dataplane.loop.failures == 0


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x00\x05hello", b"\x00\x01\x02", b"\x80\x2e\x01\x00\x02" + bytes(60)]
)
async def test_bytes_that_are_neither_tls_nor_http_end_the_connection(data):
    async with tls_dataplane(silent) as opened, client_of(opened.address) as client:
        await client.send(data)
        await client.until_closed() if data[0] == 0x16 else client.close()
        await until(lambda: opened.dataplane.services.totals.failed_handshakes == 1)
        await until(lambda: not opened.dataplane.loop.tasks)
    assert opened.workers[0].requests == []


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
async def test_an_incomplete_handshake_ends_after_client_head_secs(data):
    config = listening() + "[server.timeouts]\nclient_head_secs = 0.05\n"
    async with tls_dataplane(silent, config=config) as opened, client_of(opened.address) as client:
        await client.send(data)
        assert await client.until_closed() == b""
    assert opened.dataplane.services.totals.failed_handshakes == 1


async def test_a_handshake_may_arrive_byte_by_byte():
    async with tls_dataplane(answering(counted(b"{}"))) as opened:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = client_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
        async with client_of(opened.address) as client:
            complete = False
            while not complete:
                try:
                    tls.do_handshake()
                    complete = True
                except ssl.SSLWantReadError:
                    pass
                for byte in outgoing.read():
                    await client.send(bytes((byte,)))
                if not complete:
                    incoming.write(await client.receive())
            tls.write(post())
            for byte in outgoing.read():
                await client.send(bytes((byte,)))
            received = b""
            while not received.endswith(b"{}"):
                incoming.write(await client.receive())
                try:
                    received += tls.read(65536)
                except ssl.SSLWantReadError:
                    continue
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")


async def is_rejected(client):
    """In TLS 1.3, a client learns that its certificate was rejected only after its handshake."""
    try:
        await client.send(post())
        await client.answer()
    except (trio.BrokenResourceError, Truncated):
        return True
    return False


async def test_a_client_without_the_required_certificate_is_refused():
    config = listening(tls_client_ca=f"'{FILES / 'authority.pem'}'")
    async with tls_dataplane(answering(counted(b"{}")), config=config) as opened:
        for name in ("", "stranger"):
            async with secure_client(opened.address, client_context(own=name)) as client:
                assert await is_rejected(client)
        async with secure_client(opened.address, client_context(own="client")) as client:
            await client.send(post())
            assert (await client.answer()).status == 200
    assert opened.dataplane.services.totals.failed_handshakes == 2


async def test_an_optional_certificate_may_be_missing_but_not_wrong():
    ca = f"'{FILES / 'authority.pem'}'"
    config = listening(tls_client_ca=ca, tls_client_require="false")
    async with tls_dataplane(answering(counted(b"{}")), config=config) as opened:
        for name in ("", "client"):
            async with secure_client(opened.address, client_context(own=name)) as client:
                await client.send(post())
                assert (await client.answer()).status == 200
        async with secure_client(opened.address, client_context(own="stranger")) as client:
            assert await is_rejected(client)


def copy_certificate(folder, name):
    for suffix in ("", "-key"):
        shutil.copyfile(FILES / f"{name}{suffix}.pem", folder / f"mine{suffix}.pem")


def server_certificate(client):
    return client.secure.getpeercert(binary_form=True)


async def test_a_renewed_certificate_is_loaded_and_an_invalid_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tls_termination, "POLL_SECS", 0.02)
    copy_certificate(tmp_path, "server")
    config = f"[server]\ntls_cert = '{tmp_path}/mine.pem'\ntls_key = '{tmp_path}/mine-key.pem'\n"
    async with tls_dataplane(answering(counted(b"{}")), config=config) as opened:
        certificates = opened.dataplane.listeners.certificates
        async with secure_client(opened.address) as before:
            first = certificates.context
            (tmp_path / "mine.pem").write_text("nonsense")
            await until(lambda: certificates.error)
            assert "server.tls_cert" in certificates.error
            assert certificates.context is first
            async with secure_client(opened.address) as client:
                assert server_certificate(client) == server_certificate(before)
            copy_certificate(tmp_path, "renewed")
            await until(lambda: certificates.context is not first)
            assert certificates.status()["error"] is None
            async with secure_client(opened.address) as client:
                assert server_certificate(client) != server_certificate(before)
            await before.send(post())
            assert (await before.answer()).status == 200


async def test_a_reload_turns_tls_on_and_off_on_the_same_port():
    async with tls_dataplane(answering(counted(b"{}")), config="") as opened:
        dataplane, address = opened.dataplane, opened.address
        urls = [worker.url for worker in opened.workers]
        async with client_of(address) as early:
            dataplane.prepare(configured(listening(log_format="'json'"), urls))()
            assert opened.address == address
            assert dataplane.listeners.urls() == [f"https://{address}"]
            async with secure_client(address) as client:
                await client.send(post())
                assert (await client.answer()).status == 200
            await early.send(post())
            assert (await early.answer()).status == 200
        dataplane.prepare(configured("[server]\nlog_format = 'json'", urls))()
        assert dataplane.listeners.urls() == [f"http://{address}"]
        async with client_of(address) as client:
            await client.send(post())
            assert (await client.answer()).status == 200


async def test_a_key_that_does_not_match_its_certificate_changes_nothing():
    async with tls_dataplane(answering(counted(b"{}"))) as opened:
        broken = listening().replace("server-key", "renewed-key")
        with pytest.raises(ConfigError, match=r"server\.tls_key: .* is not the key of"):
            opened.dataplane.prepare(configured(broken, []))
        async with secure_client(opened.address) as client:
            await client.send(post())
            assert (await client.answer()).status == 200


async def test_a_drain_completes_a_handshake_and_then_closes_the_connection():
    async with tls_dataplane(silent) as opened, client_of(opened.address) as client:
        await until(lambda: any(t.phase == "handshake" for t in opened.dataplane.loop.tasks))
        opened.dataplane.begin_drain()
        secure = trio.SSLStream(client.stream, client_context(), server_hostname="localhost")
        assert await secure.receive_some(1) == b""
        await opened.dataplane.drained()
