"""TLS termination: the certificate of the listeners, and the handshake of a downstream connection.

Invariant: `Certificates.context` is always valid. A renewed pair on disk is loaded within seconds
without a reload of the configuration; an invalid one is logged once, and the current one stays.
Connections keep the certificate that they began with. No bytes are parsed as a request before the
handshake is done, which must take at most `client_head_secs`. A client that sends plain HTTP gets
a 400 in plain HTTP.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final

import trio

from omni_proxy.config.schema import ServerConfig
from omni_proxy.dataplane.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.tls_stream import (
    RECORD,
    TlsHandshake,
    TlsStream,
    read_handshake_bytes,
)
from omni_proxy.system.certificate_reload import CertificateFiles
from omni_proxy.system.tls_contexts import listener_tls_files, server_context
from omni_proxy.wire.errors import HttpError

POLL_SECS: Final = 2.0


class Certificates:
    """The certificate of the listeners. `context`: None while they use plain HTTP."""

    def __init__(self) -> None:
        self.context: ssl.SSLContext | None = None
        self._files: CertificateFiles[ssl.SSLContext] | None = None
        self._loaded_at = ""

    @property
    def error(self) -> str:
        """Why the newest files could not be loaded."""
        return self._files.error if self._files is not None else ""

    def prepare(self, new: ServerConfig) -> Callable[[], None]:
        """Load the files named in `new`. Call the result to apply them. Raises ConfigError."""
        if not new.tls_cert:
            return partial(self._apply, None, None)
        files, current = CertificateFiles(new, server_context), self._files
        if (
            current is not None
            and _identity(new) == _identity(current.server)
            and files.signatures == current.signatures
        ):
            return _keep_current
        return partial(self._apply, files, files.load())

    def _apply(
        self, files: CertificateFiles[ssl.SSLContext] | None, context: ssl.SSLContext | None
    ) -> None:
        self._files, self.context = files, context
        self._loaded_at = datetime.now(UTC).isoformat()

    async def run(self) -> None:
        """Poll the files until cancelled."""
        while True:
            await trio.sleep(POLL_SECS)
            if self._files is not None:
                await self._poll(self._files)

    async def _poll(self, files: CertificateFiles[ssl.SSLContext]) -> None:
        """Reload the files if they have changed and then stayed unchanged for a moment."""
        signatures = await trio.to_thread.run_sync(files.signatures_now)
        while signatures != files.signatures and files is self._files:
            await trio.sleep(POLL_SECS / 4)  # one of the two files may still be incomplete
            previous, signatures = signatures, await trio.to_thread.run_sync(files.signatures_now)
            if signatures == previous:
                context = await trio.to_thread.run_sync(files.reload)
                if context is not None and files is self._files:
                    self._apply(files, context)

    def status(self) -> dict[str, object] | None:
        if self._files is None or self.context is None:
            return None
        return {
            "certificate": self._files.server.tls_cert,
            "read_at": self._loaded_at,
            "clients_verified": self.context.verify_mode != ssl.CERT_NONE,
            "error": self.error or None,
        }


def _identity(server: ServerConfig) -> tuple[object, ...]:
    return (*listener_tls_files(server), server.tls_client_require)


def _keep_current() -> None:
    """The new configuration names the same files, with the same content."""


async def accept_tls(io: ExchangeIO, context: ssl.SSLContext) -> TlsStream:
    """Do the TLS handshake; returns the stream that replaces `io.client`.

    Raises HttpError for plain HTTP, ClientDisconnected, PhaseTimeout, and OSError for a handshake
    that failed.
    """
    io.set_timeout("handshake", io.settings.timeouts.client_head)
    first = await read_handshake_bytes(io, io.client)
    if first[:1] != RECORD and first[:1].isalpha():
        raise HttpError(
            400, "this listener requires TLS, but the request is plain HTTP: use https://",
            "plain_http_on_tls_port", close=True,
        )  # fmt: skip
    handshake = TlsHandshake(context)
    handshake.incoming.write(first)
    return await handshake.run(io, io.client)
