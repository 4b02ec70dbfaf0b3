"""The listener of the gRPC server: its address, and its TLS certificate and client CA.

gRPC binds with SO_REUSEPORT, so that a new program can listen before the old one stops. For the
same reason a Unix socket is bound at a temporary path and then renamed. Invariants: without
`shared` no two programs listen at one address, and only sockets are ever replaced or removed, no
other file. TLS files are checked when a connection begins.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import grpc

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import ServerConfig
from omni_proxy.system.certificate_reload import CertificateFiles
from omni_proxy.system.tls_contexts import server_context


class GrpcAddress:
    """`listen`: `host:port` or `unix:PATH`. `shared`: another program may still listen there."""

    def __init__(self, listen: str, *, shared: bool) -> None:
        self._listen = listen
        self._shared = shared
        self._path = Path(listen[5:]) if listen.startswith("unix:") else None
        self._inode = 0

    def bind(self, add_port: Callable[[str], int]) -> str:
        """Bind; return the bound address. `add_port`: method of a gRPC server. Raises OSError."""
        try:
            if self._path is not None:
                self._bind_path(self._path, add_port)
                return self._listen
            host, _, port = self._listen.rpartition(":")
            if port != "0" and not self._shared:
                _refuse_if_taken(host.strip("[]"), int(port))
            return f"{host}:{add_port(self._listen)}"
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or "gRPC refuses the address"
            number = getattr(error, "errno", None) or errno.EADDRNOTAVAIL
            raise OSError(number, f"cannot listen for Envoy: {reason}", self._listen) from None

    def unlink(self) -> None:
        """Remove the file of a Unix socket, unless another program has replaced it."""
        path = self._path
        if path is not None and path.exists() and path.stat().st_ino == self._inode:
            path.unlink()

    def _bind_path(self, path: Path, add_port: Callable[[str], int]) -> None:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise OSError(errno.EEXIST, "there is a file at this path that is not a socket")
            if not self._shared and _is_served(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        add_port(f"unix:{aside}")
        self._inode = aside.stat().st_ino
        aside.replace(path)


def _refuse_if_taken(host: str, port: int) -> None:
    """Raises OSError if another socket listens there: without SO_REUSEPORT the bind fails."""
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, _, _, address in resolved:
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(str(path)) == 0


class GrpcTls:
    """`server`: has the files as `tls_cert`, `tls_key`, `tls_client_ca`; the last may be empty."""

    def __init__(self, server: ServerConfig) -> None:
        self._files = CertificateFiles(server, _certificate_configuration)

    def credentials(self) -> grpc.ServerCredentials:
        """Raises OSError if the files can't be used."""
        try:
            first = self._files.load()
        except ConfigError as error:
            raise OSError(None, str(error)) from None
        # gRPC calls `reload` in its own thread when a connection begins. If it raised, gRPC would
        # refuse the connection.
        return grpc.dynamic_ssl_server_credentials(
            first,
            self._files.reload,
            require_client_authentication=bool(self._files.server.tls_client_ca),
        )


def _certificate_configuration(server: ServerConfig) -> grpc.ServerCertificateConfiguration:
    """Raises ConfigError, OSError."""
    server_context(server, "picker.grpc_")  # validates them, since gRPC reports no details
    key, cert = Path(server.tls_key).read_bytes(), Path(server.tls_cert).read_bytes()
    authorities = Path(server.tls_client_ca).read_bytes() if server.tls_client_ca else None
    return grpc.ssl_server_certificate_configuration([(key, cert)], authorities)
