"""TLS termination: the certificate of the listeners, and the handshake of a downstream connection.

Invariant: `Certificates.context` is always valid. A renewed pair on disk is loaded within seconds
without a reload of the configuration; an invalid one is logged once, and the current one stays.
Connections keep the certificate that they began with. No bytes are parsed as a request before the
handshake is done, which must take at most `client_head_secs`. A client that sends plain HTTP gets
a 400 in plain HTTP.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final

import trio

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import ServerConfig
from omni_proxy.dataplane.accept.proxy_protocol import read_proxy_header
from omni_proxy.dataplane.exchange.exchange_io import ExchangeIO
from omni_proxy.dataplane.loop.tls_stream import (
    RECORD,
    TlsHandshake,
    TlsStream,
    read_handshake_bytes,
)
from omni_proxy.system.files import FileSignature, file_signature
from omni_proxy.system.tls_contexts import listener_tls_files, server_context
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)

POLL_SECS: Final = 2.0

FileSignatures = tuple[FileSignature | None, ...]


class Certificates:
    """The certificate of the listeners. `context`: None while they use plain HTTP."""

    def __init__(self) -> None:
        self.context: ssl.SSLContext | None = None
        self.error = ""  # why the newest files could not be loaded
        self._server = ServerConfig()
        self._signatures: FileSignatures = ()  # when they were last read
        self._loaded_at = ""

    def prepare(self, new: ServerConfig) -> Callable[[], None]:
        """Load the files named in `new`. Call the result to apply them. Raises ConfigError."""
        if not new.tls_cert:
            return partial(self._apply, new, None, ())
        signatures = _file_signatures(new)
        if (
            self.context is not None
            and _identity(new) == _identity(self._server)
            and signatures == self._signatures
        ):
            return partial(self._apply_unchanged, new)
        return partial(self._apply, new, server_context(new), signatures)

    def _apply_unchanged(self, new: ServerConfig) -> None:
        self._server = new

    def _apply(
        self, new: ServerConfig, context: ssl.SSLContext | None, signatures: FileSignatures
    ) -> None:
        self._server, self.context, self._signatures, self.error = new, context, signatures, ""
        self._loaded_at = datetime.now(UTC).isoformat()

    async def run(self) -> None:
        """Poll the files until cancelled."""
        while True:
            await trio.sleep(POLL_SECS)
            if self.context is not None:
                await self._poll()

    async def _poll(self) -> None:
        """Reload the files if they have changed and then stayed unchanged for a moment."""
        server = self._server
        signatures = await trio.to_thread.run_sync(_file_signatures, server)
        while signatures != self._signatures and server is self._server:
            await trio.sleep(POLL_SECS / 4)  # one of the two files may still be incomplete
            previous, signatures = (
                signatures,
                await trio.to_thread.run_sync(_file_signatures, server),
            )
            if signatures == previous:
                await self._reload(server, signatures)

    async def _reload(self, server: ServerConfig, signatures: FileSignatures) -> None:
        try:
            context = await trio.to_thread.run_sync(server_context, server)
        except ConfigError as error:
            if server is self._server:
                self._signatures, self.error = signatures, str(error)
                _log.error('certificate_reload_failed file=%s error="%s"', server.tls_cert, error)
            return
        if server is self._server:
            self._apply(server, context, signatures)
            _log.info("certificate_reloaded file=%s", server.tls_cert)

    def status(self) -> dict[str, object] | None:
        if self.context is None:
            return None
        return {
            "certificate": self._server.tls_cert,
            "read_at": self._loaded_at,
            "clients_verified": self.context.verify_mode != ssl.CERT_NONE,
            "error": self.error or None,
        }


def _identity(server: ServerConfig) -> tuple[object, ...]:
    return (*listener_tls_files(server), server.tls_client_require)


def _file_signatures(server: ServerConfig) -> FileSignatures:
    return tuple(map(file_signature, listener_tls_files(server)))


async def accept_tls(
    io: ExchangeIO, context: ssl.SSLContext, *, reads_proxy_header: bool
) -> TlsStream:
    """Do the TLS handshake; returns the stream that replaces `io.client`.

    `reads_proxy_header`: a PROXY header comes first. Raises HttpError for plain HTTP,
    ClientDisconnected, PhaseTimeout, and OSError for a handshake that failed.
    """
    if reads_proxy_header:
        await read_proxy_header(io)
    io.set_timeout("handshake", io.settings.limits.client_head)
    first = await read_handshake_bytes(io, io.client)
    if first[:1] != RECORD and first[:1].isalpha():
        raise HttpError(
            400, "this listener requires TLS, but the request is plain HTTP: use https://",
            "plain_http_on_tls_port", close=True,
        )  # fmt: skip
    handshake = TlsHandshake(context)
    handshake.incoming.write(first)
    return await handshake.run(io, io.client)
