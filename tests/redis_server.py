"""A real cluster store: starts a redis-server or valkey-server on loopback."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.ports import free_port

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_store = pytest.mark.skipif(
    PROGRAM is None, reason="no redis-server: apt-get install redis-server"
)
CERTIFICATES = Path(__file__).parent / "promises" / "support" / "certificates"
STARTED_SECS = 30  # a deadline for hung tests


class RedisServer:
    """A server that keeps its `url` over restarts, but not its data."""

    def __init__(self, *options: str, tls: bool = False) -> None:
        assert PROGRAM is not None
        self.port = free_port()
        self.url = f"{'rediss' if tls else 'redis'}://127.0.0.1:{self.port}"
        port = ["--port", str(self.port)]
        if tls:
            certificate, key = CERTIFICATES / "server.pem", CERTIFICATES / "server-key.pem"
            port = [
                "--port", "0", "--tls-port", str(self.port), "--tls-cert-file", str(certificate),
                "--tls-key-file", str(key), "--tls-ca-cert-file",
                str(CERTIFICATES / "authority.pem"), "--tls-auth-clients", "no",
            ]  # fmt: skip
        self._argv = [
            PROGRAM, *port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns when the server listens."""
        self._launch()
        with trio.fail_after(STARTED_SECS):
            while True:
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", self.port)
                except OSError:
                    await trio.sleep(0.02)
                    continue
                await stream.aclose()
                return

    def _launch(self) -> None:
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self._process is not None:
            self.kill()


@asynccontextmanager
async def redis_server(*options: str, tls: bool = False) -> AsyncIterator[RedisServer]:
    """`tls`: with the certificate of the tests, and without a plain port."""
    server = RedisServer(*options, tls=tls)
    try:
        await server.start()
        yield server
    finally:
        server.end()
