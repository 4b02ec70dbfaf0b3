"""How the API server of a `[[discover]]` is reached: its URL, namespace, CAs, certificate, token.

Invariant: files are read again for each request, for Kubernetes rotates all of them; a token is
never logged, and never sent in clear text but to a loopback address. Blocking: call it in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.config.url import normalize_url
from omni_proxy.discovery_watch.api_connection import ApiEndpoint, ApiError
from omni_proxy.system.tls_contexts import PemError, load_certificate, new_client_context

# Where Kubernetes mounts it, in every container.
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
ALL_NAMESPACES: Final = "*"
MAX_TOKEN_BYTES: Final = 65536


class ClusterAccess:
    def __init__(
        self,
        entry: DiscoverEntry,
        environ: Mapping[str, str] = os.environ,
        account: Path = SERVICE_ACCOUNT,
    ) -> None:
        self._entry = entry
        self._environ = environ
        self._account = account

    def endpoint(self) -> ApiEndpoint:
        """Raises ApiError."""
        entry = self._entry
        in_cluster = not entry.api_server
        url = self._own_server() if in_cluster else entry.api_server
        token_file = entry.token_file or (str(self._account / "token") if in_cluster else "")
        token = self._read(token_file) if token_file else ""
        if not url.startswith("https://"):
            return ApiEndpoint(url, None, token)
        ca_file = entry.ca_file or (str(self._account / "ca.crt") if in_cluster else "")
        try:
            context = new_client_context(ca_file)
            if entry.client_cert:
                load_certificate(context, entry.client_cert, entry.client_key)
        except (PemError, OSError) as error:
            raise ApiError(str(error)) from None
        return ApiEndpoint(url, context, token)

    def namespace(self) -> str:
        """ALL_NAMESPACES for all. Raises ApiError."""
        return self._entry.namespace or self._read(str(self._account / "namespace"))

    def _own_server(self) -> str:
        host, port = self._environ.get(HOST, ""), self._environ.get(PORT, "443")
        if not host:
            raise ApiError(f"not in a cluster ({HOST} is not set): name api_server")
        try:
            return normalize_url(f"https://{f'[{host}]' if ':' in host else host}:{port}",
                                 allow_unix=False)  # fmt: skip
        except ValueError as error:
            raise ApiError(f"{HOST} and {PORT}: {error}") from None

    def _read(self, file: str) -> str:
        try:
            with open(file, encoding="ascii") as opened:
                text = opened.read(MAX_TOKEN_BYTES).strip()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "is not ASCII"
            raise ApiError(f"{file} cannot be read: {reason}") from None
        if not text or not text.isprintable():
            raise ApiError(f"{file} is empty, or is no single line")
        return text
