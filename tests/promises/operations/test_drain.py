import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.promises.support.clients import STREAMED, Client, Truncated, client_of, post
from tests.promises.support.fakes import (
    LAST_CHUNK,
    PATIENCE_SECS,
    SSE_HEAD,
    chunk,
    counted,
    fake_workers,
)
from tests.promises.support.fleet_program import Program, program, put, toml

FIRST, SECOND = chunk(b"data: one\n\n"), chunk(b"data: two\n\n")


class Halting:
    """Answers in two halves; the second waits until `may` is set."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.may = trio.Event()

    async def __call__(self, call):
        streamed = b"stream" in call.body
        if streamed:
            await call.send(SSE_HEAD, FIRST)
        self.asked.set()
        await self.may.wait()
        await call.send(*((SECOND, LAST_CHUNK) if streamed else (counted(b"{}"),)))


@pytest.fixture
def script():
    return Halting()


@asynccontextmanager
async def running_over(script, tmp_path, more=""):
    file = tmp_path / "proxy.toml"
    async with fake_workers(script) as fakes:
        put(file, toml(fakes, more=more))
        async with program("--config", file) as running:
            await running.until_routable(*fakes)
            yield running


def connected(running: Program):
    return client_of(running.client.base_url.netloc.decode())


async def drain(running: Program, idle: Client, number: int = signal.SIGTERM) -> None:
    """Returns once the proxy has begun to drain: it closes idle connections then."""
    running.process.send_signal(number)
    assert await idle.until_closed() == b""


async def until_refused(address: str) -> None:
    host, _, port = address.rpartition(":")
    with trio.fail_after(PATIENCE_SECS):
        while True:
            try:
                stream = await trio.open_tcp_stream(host, int(port))
            except OSError:
                return
            await stream.aclose()


async def exit_status(running: Program) -> int:
    with trio.fail_after(PATIENCE_SECS):
        return await running.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_drain_answers_requests_in_flight_and_closes_their_connections(
    tmp_path, script, number
):
    async with (
        running_over(script, tmp_path) as running,
        connected(running) as idle,
        connected(running) as unary,
        connected(running) as stream,
    ):
        address = running.client.base_url.netloc.decode()
        await unary.send(post(), post())
        await script.asked.wait()
        await stream.send(post(STREAMED))
        await stream.until(FIRST)
        await drain(running, idle, number)
        await until_refused(address)
        script.may.set()
        answer = await unary.answer()
        assert (answer.status, answer.body) == (200, b"{}")
        assert answer.one("connection") == "close"
        assert await unary.until_closed() == b""
        assert await stream.until(LAST_CHUNK) == SECOND + LAST_CHUNK
        assert await stream.until_closed() == b""
        assert await exit_status(running) == 0


async def test_a_second_signal_aborts_the_drain(tmp_path, script):
    async with running_over(script, tmp_path) as running:
        async with connected(running) as idle, connected(running) as stream:
            await stream.send(post(STREAMED))
            await stream.until(FIRST)
            await drain(running, idle)
            running.process.send_signal(signal.SIGTERM)
            assert not (await stream.until_closed()).endswith(LAST_CHUNK)
            assert await exit_status(running) == 0
        script.may.set()


async def test_the_drain_ends_at_its_timeout(tmp_path, script):
    async with running_over(script, tmp_path, "drain_timeout_secs = 0.2") as running:
        async with connected(running) as idle, connected(running) as client:
            await client.send(post())
            await script.asked.wait()
            await drain(running, idle)
            with pytest.raises(Truncated):
                await client.answer()
            assert await exit_status(running) == 0
        await running.until_logged("aborted_connections=1")
        script.may.set()


async def test_a_partly_received_request_is_answered_during_a_drain(tmp_path, script):
    script.may.set()
    request = post()
    async with (
        running_over(script, tmp_path) as running,
        connected(running) as idle,
        connected(running) as client,
    ):
        await client.send(request[:30])
        await running.until("/status", lambda body: body["data_plane"]["phases"].get("head"))
        await drain(running, idle)
        await client.send(request[30:])
        answer = await client.answer()
        assert (answer.status, answer.one("connection")) == (200, "close")
        assert await exit_status(running) == 0


async def test_ready_fails_before_the_drain_begins(tmp_path, script):
    async with running_over(script, tmp_path, "ready_off_secs = 600") as running:
        assert (await running.client.get("/ready")).status_code == 200
        running.process.send_signal(signal.SIGTERM)
        await running.until_logged("shutdown_started")
        assert (await running.client.get("/ready")).status_code == 503
        assert (await running.client.get("/live")).status_code == 200
        script.may.set()
        assert (await running.ask()).status_code == 200
        running.process.send_signal(signal.SIGTERM)
        assert await exit_status(running) == 0


async def test_an_idle_program_exits_at_once(tmp_path, script):
    async with running_over(script, tmp_path) as running:
        assert await running.leave() == 0
        await running.until_logged("proxy_stopped")


async def test_a_port_in_use_prevents_the_start_with_a_message(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "proxy.toml"
        put(file, toml([], port=port))
        command = [sys.executable, "-m", "omni_proxy", "--config", str(file)]
        with trio.fail_after(PATIENCE_SECS):
            refused = await trio.run_process(
                command, capture_stderr=True, check=False, cwd=Path(__file__).parents[3]
            )
    output = refused.stderr.decode()
    assert refused.returncode == 1
    assert f'listen_failed address=127.0.0.1:{port} error="Address already in use"' in output
    assert "Traceback" not in output
