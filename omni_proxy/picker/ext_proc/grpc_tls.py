"""TLS of the gRPC listener: its certificate and client CA, reloaded when the files change.

Invariant: the files are checked when a connection begins, and only a complete, consistent set
replaces the one in use. gRPC calls `_newest` in its own thread, for one connection at a time.
"""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import ServerConfig
from omni_proxy.system.files import FileSignature, file_signature
from omni_proxy.system.tls_contexts import listener_tls_files, server_context

_log = logging.getLogger(__name__)


class GrpcTls:
    """`server`: has the files as `tls_cert`, `tls_key`, `tls_client_ca`; the last may be empty."""

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self._signatures = self._signatures_now()

    def credentials(self) -> grpc.ServerCredentials:
        """Raises OSError if the files can't be used."""
        try:
            first = self._read()
        except ConfigError as error:
            raise OSError(None, str(error)) from None
        return grpc.dynamic_ssl_server_credentials(
            first, self._newest, require_client_authentication=bool(self._server.tls_client_ca)
        )

    def _newest(self) -> grpc.ServerCertificateConfiguration | None:
        """The new files, None if unchanged. Never raises: gRPC would refuse the connection."""
        signatures = self._signatures_now()
        if signatures == self._signatures:
            return None
        try:
            found = self._read()
        except (ConfigError, OSError) as error:
            self._signatures = signatures
            file = self._server.tls_cert
            _log.error('certificate_reload_failed file=%s error="%s"', file, error)
            return None
        if signatures != self._signatures_now():
            return None  # the files are being replaced: the next connection checks again
        self._signatures = signatures
        _log.info("certificate_reloaded file=%s", self._server.tls_cert)
        return found

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Raises ConfigError, OSError."""
        server = self._server
        server_context(server, "picker.grpc_")  # validates them, since gRPC reports no details
        key, cert = Path(server.tls_key).read_bytes(), Path(server.tls_cert).read_bytes()
        authorities = Path(server.tls_client_ca).read_bytes() if server.tls_client_ca else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], authorities)

    def _signatures_now(self) -> tuple[FileSignature | None, ...]:
        return tuple(map(file_signature, listener_tls_files(self._server)))
