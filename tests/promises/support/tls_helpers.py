"""TLS for tests: certificates, clients of a TLS listener, and workers with HTTPS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.promises.support.clients import STREAMED, Client, post
from tests.promises.support.fakes import LAST_CHUNK, SSE_HEAD, Call, FakeWorker, Script, chunk

FILES = Path(__file__).parent / "certificates"
AUTHORITY = FILES / "authority.pem"


def listening(name: str = "server", **others: str) -> str:
    """Returns a [server] table with this certificate; `others` has more of its keys, as TOML."""
    lines = "".join(f"{key} = {value}\n" for key, value in others.items())
    return f"[server]\ntls_cert = '{FILES / name}.pem'\ntls_key = '{FILES / name}-key.pem'\n{lines}"


def client_context(name: str = "authority", own: str = "") -> ssl.SSLContext:
    """Returns a client context with a trusted certificate, and optionally a client certificate."""
    context = ssl.create_default_context(cafile=FILES / f"{name}.pem")
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    if own:
        context.load_cert_chain(FILES / f"{own}.pem", FILES / f"{own}-key.pem")
    return context


def server_context(name: str = "server") -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    context.load_cert_chain(FILES / f"{name}.pem", FILES / f"{name}-key.pem")
    return context


class SecureClient(Client):
    """A client whose stream is trio's TLS; `raw` is the connection below it."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        super().__init__(stream)  # type: ignore[arg-type]
        self.secure = stream
        self.raw = stream.transport_stream

    def close(self) -> None:
        """Closes the socket without a TLS alert."""
        self.raw.socket.close()

    def stop_sending(self) -> None:
        """Half-closes the socket without a TLS alert."""
        self.raw.socket.shutdown(socket.SHUT_WR)


@asynccontextmanager
async def secure_client(
    address: str,
    context: ssl.SSLContext | None = None,
    name: str = "localhost",
    *,
    https_compatible: bool = True,
) -> AsyncIterator[SecureClient]:
    """`https_compatible`: the server may close without close_notify; its own is not sent either."""
    host, _, port = address.rpartition(":")
    raw = await trio.open_tcp_stream(host, int(port))
    async with raw:
        secure = trio.SSLStream(
            raw,
            context or client_context(),
            server_hostname=name,
            https_compatible=https_compatible,
        )
        with trio.fail_after(30):
            await secure.do_handshake()
        yield SecureClient(secure)


class SecureWorker(FakeWorker):
    """A worker with HTTPS and one certificate; `resumed` has whether each connection resumed."""

    def __init__(self, script: Script, name: str = "server", host: str = "127.0.0.1") -> None:
        super().__init__(script)
        self.context = server_context(name)
        self.host = host
        self.resumed: list[bool] = []
        self.names: list[str | None] = []
        self.context.sni_callback = lambda _, name, __: self.names.append(name)

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"https://{self.host}:{listener.socket.getsockname()[1]}"
        await trio.serve_listeners(self._handshake, [listener], task_status=task_status)

    async def _handshake(self, raw: trio.SocketStream) -> None:
        secure = trio.SSLStream(raw, self.context, server_side=True, https_compatible=True)
        try:
            await secure.do_handshake()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        self.resumed.append(bool(secure.session_reused))
        async with raw:
            await self._connection(secure)  # type: ignore[arg-type]


@asynccontextmanager
async def secure_workers(*workers: SecureWorker) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for worker in workers:
            await nursery.start(worker.serve)
        yield
        nursery.cancel_scope.cancel()


class TwoEvents:
    """A script that streams one event, and a second one once the client has received the first."""

    def __init__(self) -> None:
        self._received = trio.Event()

    async def __call__(self, call: Call) -> None:
        await call.send(SSE_HEAD, chunk(b"data: 1\n\n"))
        await self._received.wait()
        await call.send(chunk(b"data: 2\n\n"), LAST_CHUNK)

    async def relayed_to(self, client: Client) -> None:
        await client.send(post(STREAMED))
        await client.until(b"data: 1\n\n")
        self._received.set()
        await client.until(b"data: 2\n\n")
