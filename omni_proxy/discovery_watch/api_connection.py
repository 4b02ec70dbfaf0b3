"""Access to the Kubernetes API server of a `[[discover]]`: one GET request for each connection.

Invariant: the certificate of an https server is always verified, no redirect is followed, no proxy
variable is read, and every wait has a timeout. Each read is a checkpoint, of at most `READ_BYTES`.
Failures are `ApiError`s, also a truncated body. CAs, certificate and token are read again for each
request, because Kubernetes rotates them; a token is never logged, and never sent unencrypted except
to a loopback address. `ClusterAccess` blocks: call it in a thread.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httptools
import trio

from omni_proxy import __version__
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.config.url import normalize_url
from omni_proxy.shared.origins import DEFAULT_PORTS
from omni_proxy.system.tls_contexts import (
    PemError,
    load_certificate,
    new_client_context,
    tls_error_text,
)

READ_BYTES: Final = 65536
CONNECT_SECS: Final = 5.0
HEAD_SECS: Final = 10.0
MAX_HEAD_BYTES: Final = 65536


class ApiError(Exception):
    """A request failed. `status`: of the server's response, 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ApiTimeout(ApiError):
    """Nothing was received within the timeout."""


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """The API server's URL and the credentials for it."""

    url: str  # normalized
    context: ssl.SSLContext | None = None  # only for https
    token: str = ""


class _Parser:
    """Callbacks of the httptools parser."""

    def __init__(self) -> None:
        self.head_complete = False
        self.complete = False
        self.has_length = False  # the body has a content-length, or is chunked
        self.body = bytearray()
        self.head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head_bytes += len(name) + len(value)
        self.has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.head_complete = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class ApiResponse:
    """The response to one request; the caller closes it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._callbacks = _Parser()
        self._parser = httptools.HttpResponseParser(self._callbacks)
        self.status = 0

    async def read_head(self) -> None:
        """Read the response head. Raises ApiError."""
        with trio.move_on_after(HEAD_SECS) as scope:
            while not self._callbacks.head_complete:
                await self._read()
        if scope.cancelled_caught:
            raise ApiError(f"no answer within {HEAD_SECS:g} s")
        self.status = self._parser.get_status_code()

    async def read(self, silence_secs: float) -> bytes:
        """The next piece of the body, b"" at its end. Raises ApiError, ApiTimeout."""
        with trio.move_on_after(silence_secs) as scope:
            while not self._callbacks.body and not self._callbacks.complete:
                await self._read()
        if scope.cancelled_caught:
            raise ApiTimeout(f"nothing was received for {silence_secs:g} s")
        piece = bytes(self._callbacks.body)
        self._callbacks.body.clear()
        return piece

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        try:
            data = await self._stream.receive_some(READ_BYTES)
        except (trio.BrokenResourceError, OSError, ssl.SSLError) as error:
            raise ApiError(f"the connection broke: {_reason(error)}") from None
        if not data:
            self._end()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ApiError(f"not HTTP: {error}") from None
        if not self._callbacks.head_complete and self._callbacks.head_bytes > MAX_HEAD_BYTES:
            raise ApiError(f"a response head of more than {MAX_HEAD_BYTES} bytes")

    def _end(self) -> None:
        """The server closed the connection, which ends a body without a length.

        Raises ApiError if the response is incomplete.
        """
        if not self._callbacks.head_complete or self._callbacks.has_length:
            raise ApiError("the connection was closed")
        self._callbacks.complete = True


async def get(endpoint: ApiEndpoint, target: str, headers: Mapping[str, str]) -> ApiResponse:
    """Send the request and read the head of the response. Raises ApiError."""
    parts = urlsplit(endpoint.url)
    host = parts.hostname or ""
    stream = await _connect(host, parts.port or DEFAULT_PORTS[parts.scheme], endpoint.context)
    try:
        fields = {
            "Host": parts.netloc,
            "User-Agent": f"omni-proxy/{__version__}",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
            **({"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        try:
            with trio.fail_after(HEAD_SECS):
                await stream.send_all(f"GET {target} HTTP/1.1\r\n{head}\r\n".encode("ascii"))
        except (trio.BrokenResourceError, trio.TooSlowError, OSError, UnicodeError) as error:
            raise ApiError(f"the request could not be sent: {_reason(error)}") from None
        response = ApiResponse(stream)
        await response.read_head()
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)
        raise
    return response


async def _connect(host: str, port: int, context: ssl.SSLContext | None) -> trio.abc.Stream:
    stream: trio.abc.Stream | None = None
    try:
        with trio.fail_after(CONNECT_SECS):
            stream = await trio.open_tcp_stream(host, port)
            if context is not None:
                secure = trio.SSLStream(
                    stream, context, server_hostname=host, https_compatible=True
                )
                stream = secure
                await secure.do_handshake()
            return stream
    except trio.TooSlowError:
        failure = ApiError(f"no connection to {host}:{port} within {CONNECT_SECS:g} s")
    except (OSError, trio.BrokenResourceError, UnicodeError) as error:
        failure = ApiError(f"no connection to {host}:{port}: {_reason(error)}")
    if stream is not None:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)
    raise failure


def _reason(error: BaseException) -> str:
    """The reason text of OpenSSL or of the operating system."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):  # one for each address of the host
        cause = cause.exceptions[-1]
    inner = cause if isinstance(cause, ssl.SSLError | OSError) else error
    if isinstance(inner, ssl.SSLError):
        return tls_error_text(inner)
    return getattr(inner, "strerror", None) or str(inner) or type(inner).__name__


# Kubernetes mounts it there in every container.
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
        """The API server's URL, TLS context and token. Raises ApiError."""
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
        """The namespace, or ALL_NAMESPACES. Raises ApiError."""
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
            raise ApiError(f"{file} is empty, or is not a single line")
        return text
