"""Workers with https URLs: which certificates the proxy trusts, and how it uses connections."""

import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
import trio

from omni_proxy.config.overlay import desired_workers
from omni_proxy.config.parse import parse
from omni_proxy.config.state import SavedState
from tests.dataplane.loop_script import until
from tests.ports import free_port
from tests.promises.support.clients import CHAT, Truncated, post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.fakes import (
    answering,
    counted,
    fake_workers,
    silent,
)
from tests.promises.support.tls_helpers import (
    AUTHORITY,
    FILES,
    SecureWorker,
    TwoEvents,
    secure_workers,
)

TRUSTING = f"[server]\ntls_worker_ca = '{AUTHORITY}'\n"
OK = answering(counted(b"{}"))


@asynccontextmanager
async def dataplane_to(*workers, config=TRUSTING):
    async with secure_workers(*workers), run_dataplane(*workers, config=config) as opened:
        yield opened


async def ask(opened, body=CHAT):
    async with opened.client() as client:
        await client.send(post(body))
        return await client.answer()


async def test_requests_share_one_kept_connection():
    worker = SecureWorker(OK, host="localhost")
    async with dataplane_to(worker) as opened, opened.client() as client:
        for _ in range(6):  # the last ones take the fast path
            await client.send(post())
            assert (await client.answer()).status == 200
    assert len(worker.calls) == 1
    assert worker.names == ["localhost"]


async def test_an_ip_address_is_verified_and_not_sent_as_server_name():
    worker = SecureWorker(OK)
    async with dataplane_to(worker) as opened:
        assert (await ask(opened)).status == 200
    assert worker.names == [None]


async def test_large_bodies_and_responses_are_relayed_unchanged():
    response = bytes(range(256)) * 8_000
    body = b'{"messages": [], "x": "%b"}' % (b"y" * 900_000)
    worker = SecureWorker(answering(counted(response)))
    async with dataplane_to(worker) as opened, opened.client() as client:
        for sent in (body, body, CHAT, CHAT, CHAT):
            await client.send(post(sent))
            assert (await client.answer()).body == response
    assert [received for _, received in worker.requests] == [body, body, CHAT, CHAT, CHAT]


async def test_a_large_body_is_sent_at_once_over_an_idle_connection():
    """The socket has been writable all along, so epoll reports no new event for it."""
    worker = SecureWorker(OK)
    large = b'{"messages": [], "x": "%b"}' % (b"y" * 100_000)
    config = TRUSTING + "[server.timeouts]\nresponse_head_secs = 5\n"
    async with dataplane_to(worker, config=config) as opened, opened.client() as client:
        for sent in (CHAT, CHAT, large, large):
            await client.send(post(sent))
            assert (await client.answer()).status == 200
    assert [received for _, received in worker.requests] == [CHAT, CHAT, large, large]
    assert len(worker.calls) == 1


async def test_events_arrive_one_by_one():
    events = TwoEvents()
    async with dataplane_to(SecureWorker(events)) as opened, opened.client() as client:
        await events.relayed_to(client)


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        ("", "server", b"certificate verify failed"),
        (TRUSTING, "stranger", b"certificate verify failed"),
        (TRUSTING, "elsewhere", b"IP address mismatch"),
    ],
)
async def test_a_worker_with_an_untrusted_certificate_gets_no_request(config, name, message):
    worker = SecureWorker(OK, name)
    async with dataplane_to(worker, config="[routing]\nmax_total_retries = 1\n" + config) as opened:
        answer = await ask(opened)
        assert answer.status == 502
        assert message in answer.body
        assert opened.failures() == [1]
    assert worker.requests == []


async def test_a_worker_with_a_trusted_certificate_is_tried_instead():
    bad, good = SecureWorker(OK, "stranger"), SecureWorker(OK)
    async with dataplane_to(bad, good) as opened:
        for _ in range(2):
            assert (await ask(opened)).status == 200
    assert (len(bad.requests), len(good.requests)) == (0, 2)


def entry(worker, keys):
    return f"[[workers]]\nurl = '{worker.url}'\n{keys}\n"


@pytest.mark.parametrize("keys", ["tls_verify = false", f"tls_ca = '{FILES / 'stranger.pem'}'"])
async def test_a_worker_can_have_its_own_authority_or_no_verification(keys):
    worker = SecureWorker(OK, "stranger")
    async with secure_workers(worker):
        config = TRUSTING + entry(worker, keys)
        async with run_dataplane(config=config) as opened:
            assert (await ask(opened)).status == 200
    assert len(worker.requests) == 1


async def test_a_change_of_verification_applies_to_the_next_request():
    worker = SecureWorker(OK, "stranger")
    async with secure_workers(worker):
        unverified = TRUSTING + entry(worker, "tls_verify = false")
        async with run_dataplane(config=unverified) as opened:
            assert (await ask(opened)).status == 200
            verified = parse(TRUSTING + entry(worker, ""))
            opened.fleet.apply(desired_workers(verified, (), SavedState()), datetime.now(UTC))
            assert (await ask(opened)).status == 502
    assert len(worker.requests) == 1


async def test_a_new_connection_resumes_the_session_of_an_old_one():
    async def once(call):
        await call.send(counted(b"{}", "connection: close"))

    worker = SecureWorker(once, host="localhost")
    worker.context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with dataplane_to(worker) as opened:
        for _ in range(2):
            assert (await ask(opened)).status == 200
    assert worker.resumed == [False, False]  # connections that were not kept give no session

    kept = SecureWorker(OK, host="localhost")
    async with dataplane_to(kept) as opened:
        assert (await ask(opened)).status == 200
        [pool] = opened.dataplane.upstream_pools.known.values()
        pool.idle.pop().close()
        assert (await ask(opened)).status == 200
    assert kept.resumed == [False, True]


async def test_a_late_session_ticket_closes_no_idle_connection():
    calls = []

    async def record_call(call):
        await call.send(counted(b"{}"))
        calls.append(call)

    worker = SecureWorker(record_call)
    async with dataplane_to(worker) as opened:
        assert (await ask(opened)).status == 200
        [pool] = opened.dataplane.upstream_pools.known.values()
        [stream] = pool.idle
        # Nothing in Python's ssl sends a ticket at a later time.
        stream.readable = True
        pool._drop(stream)  # as for a readable event without application data
        assert pool.idle == [stream]
        await calls[0].send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await until(lambda: pool.idle == [])


async def test_a_handshake_that_is_never_answered_is_cut_by_connect_secs():
    async with fake_workers(silent) as (worker,):
        url = worker.url.replace("http:", "https:")
        config = TRUSTING + "[server.timeouts]\nconnect_secs = 0.05\n[routing]\n"
        async with run_dataplane(url, config=config + "max_total_retries = 1\n") as opened:
            answer = await ask(opened)
            assert answer.status == 502
            assert b"ConnectTimeout" in answer.body


async def test_a_worker_that_speaks_plain_http_is_a_failed_attempt():
    async def plain(call):
        await call.send(counted(b"{}"))

    async with fake_workers(plain) as (worker,):
        url = worker.url.replace("http:", "https:")
        config = TRUSTING + "[routing]\nmax_total_retries = 1\n[server.timeouts]\nconnect_secs = 1"
        async with run_dataplane(url, config=config) as opened:
            assert (await ask(opened)).status == 502


async def test_a_disconnect_closes_the_connection_to_the_worker():
    asked, left = trio.Event(), trio.Event()

    async def script(call):
        asked.set()
        await call.until_left()
        left.set()

    async with dataplane_to(SecureWorker(script)) as opened:
        async with opened.client() as client:
            await client.send(post())
            await asked.wait()
        await left.wait()
        await until(lambda: opened.dataplane.services.totals.ended["client_disconnected"] == 1)


async def test_a_response_that_ends_with_its_connection_needs_a_tls_close():
    """Otherwise an attacker on the network could truncate the response unnoticed."""

    async def cut(call):
        await call.send(b"HTTP/1.1 200 OK\r\n\r\nhalf of i")
        call.stream.transport_stream.socket.close()

    async def whole(call):
        await call.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await call.stream.unwrap()

    async with dataplane_to(SecureWorker(cut)) as opened:
        with pytest.raises(Truncated):
            await ask(opened)
    async with dataplane_to(SecureWorker(whole)) as opened:
        assert (await ask(opened)).body == b"all of it"


async def test_a_replaced_authority_file_applies_to_the_next_connection(tmp_path):
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes((FILES / "stranger.pem").read_bytes())
    worker = SecureWorker(OK)
    config = f"[server]\ntls_worker_ca = '{authorities}'\n[routing]\nmax_total_retries = 1\n"
    async with dataplane_to(worker, config=config) as opened:
        assert (await ask(opened)).status == 502
        authorities.write_bytes(AUTHORITY.read_bytes())
        assert (await ask(opened)).status == 200
        # An invalid file leaves the previous authorities in force.
        authorities.write_text("nonsense")
        [pool] = opened.dataplane.upstream_pools.known.values()
        pool.idle.pop().close()
        assert (await ask(opened)).status == 200


async def test_a_body_that_the_worker_reads_slowly_is_sent_completely():
    """On a new connection, session tickets arrive while the request is still being sent."""
    may_read = trio.Event()

    class Slow(SecureWorker):
        async def _connection(self, stream):
            await may_read.wait()
            await super()._connection(stream)

    body = b'{"messages": [], "x": "%b"}' % (b"y" * 6_000_000)
    worker = Slow(OK)
    async with (
        dataplane_to(worker) as opened,
        opened.client() as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.send, post(body))
        await until(lambda: any(task.phase == "send" for task in opened.dataplane.loop.tasks))
        may_read.set()
        assert (await client.answer()).status == 200
    assert len(worker.requests[0][1]) == len(body)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_a_renegotiation_is_refused_at_once():
    port = free_port()
    async with openssl_server(port) as server:
        config = f"{TRUSTING}[routing]\nmax_total_retries = 0\n"
        url = f"https://127.0.0.1:{port}"
        async with run_dataplane(url, config=config) as opened, opened.client() as client:
            await client.send(post())
            await until_output(server, b"messages")
            await server.stdin.send_all(b"r\n")
            await until_output(server, b"no renegotiation")
            assert (await client.answer()).status == 502  # as openssl sent no response


@asynccontextmanager
async def openssl_server(port):
    """`openssl s_server`: it sends its input to the peer, except lines that are its commands."""
    command = ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-tls1_2", "-crlf"]
    command += ["-cert", str(FILES / "server.pem"), "-key", str(FILES / "server-key.pem")]
    pipe = subprocess.PIPE
    server = await trio.lowlevel.open_process(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
    )
    try:
        await until_output(server, b"ACCEPT")
        yield server
    finally:
        server.kill()
        await server.wait()


async def until_output(server, text):
    output = b""
    with trio.fail_after(10):
        while text not in output:
            piece = await server.stdout.receive_some(65536)
            assert piece, output
            output += piece
