"""Client of the admin API of a running proxy: finds its URL and key, sends requests.

Invariant: whatever prevents a response from an omni-proxy is an `AdminClientError`, whose text
gives the remedy; a response of the proxy, success or error, is an `AdminReply`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from omni_proxy import __version__
from omni_proxy.cli.client.config_salvage import salvage_config
from omni_proxy.cli.client.tls_options import (
    NO_CLIENT_CERT,
    ClientCert,
    ClientCertError,
    add_tls_arguments,
    client_cert_of,
    create_tls_context,
    explain_tls_error,
)
from omni_proxy.cli.terminal_text import printable, strip_noise
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import AdminConfig, Config, ServerConfig
from omni_proxy.runtime_config.config_store import read_file

if TYPE_CHECKING:
    import httpx

DEFAULT_URL: Final = "http://127.0.0.1:30000"
KEY_VARIABLE: Final = "SGLANG_OMNI_ADMIN_KEY"
ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to listen on, not to dial
CONNECT_SECS: Final = 5.0
ANSWER_SECS: Final = 15.0
EXIT_NOT_REACHABLE: Final = 2  # exit status if no proxy could be reached
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_WHERE: Final = "pass its address with --url URL, or its configuration file with --config FILE"

JsonObject = dict[str, Any]


class AdminClientError(Exception):
    """No response from an omni-proxy; the text gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class AdminTarget:
    """Where the proxy is. `key_from` describes the source of `key`, for error messages.
    `certificate` is the file of the server's certificate, if known."""

    url: str
    key: str = ""
    key_from: str = ""
    certificate: str = ""
    client_cert: ClientCert = NO_CLIENT_CERT


@dataclass(frozen=True, slots=True)
class AdminReply:
    """A response of an omni-proxy; `refusal` is "" on success."""

    status: int
    body: JsonObject

    @property
    def refusal(self) -> str:
        error = self.body.get("error")
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
        return "" if self.status < 400 else f"status {self.status}"

    @property
    def code(self) -> str:
        """The error code of the refusal; "" if it has none."""
        error = self.body.get("error")
        return str(error.get("code") or "") if isinstance(error, dict) else ""


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the proxy, which every client command has."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", metavar="URL", help=f"URL of the proxy, or unix:PATH (default {DEFAULT_URL})"
    )
    where.add_argument(
        "--config", metavar="FILE", type=Path, help="use the proxy that runs with this file"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"admin key (default: the file's, else {KEY_VARIABLE}, else one of the file's "
        "key_env)",
    )
    add_tls_arguments(parser)


def with_default_command(argv: Sequence[str], default: str) -> list[str]:
    """argv with the subcommand first, also if target flags precede it; without one, `default`."""
    if argv and argv[0] in ("-h", "--help"):
        return list(argv)
    target_parser = argparse.ArgumentParser(add_help=False)
    add_target_arguments(target_parser)
    valued = {option for action in target_parser._actions for option in action.option_strings}
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        if argv[index] in valued:
            index += 1
        elif argv[index] != "--json" and argv[index].partition("=")[0] not in valued:
            break
        index += 1
    if index < len(argv) and not argv[index].startswith("-"):
        return [argv[index], *argv[:index], *argv[index + 1 :]]
    return [default, *argv]


def admin_target_of(arguments: argparse.Namespace) -> AdminTarget:
    """Raises AdminClientError."""
    client_cert = client_cert_of(arguments)
    config, broken = config_of(arguments)
    if broken:
        print(
            f"warning: {printable(broken)}; the running proxy keeps its configuration",
            file=sys.stderr,
        )
    if config is not None:
        url = _url_of(config, arguments.config)
        _require_client_cert(config, url, arguments.config, client_cert)
    else:
        typed = arguments.url or DEFAULT_URL.removeprefix("http://")
        url = normalize_admin_url(typed, "https" if client_cert else "http")
    if client_cert and url.startswith("http:"):
        raise AdminClientError(
            f"{url} is plain HTTP: leave --ca and --client-cert out, or use https://"
        )
    keys = [
        (arguments.api_key or "", "--api-key"),
        (_main_key(config.admin, config.server) if config else "", str(arguments.config)),
        (os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE),
        *(_named_keys(config.admin) if config else ()),
    ]
    key, key_from = next((pair for pair in keys if pair[0]), ("", ""))
    return AdminTarget(url, key, key_from, config.server.tls_cert if config else "", client_cert)


def _main_key(admin: AdminConfig, server: ServerConfig) -> str:
    """The proxy's own rule: [server] api_key is the admin key only if [admin] sets none."""
    return admin.api_key if admin.api_key or admin.keys else server.api_key


def _named_keys(admin: AdminConfig) -> Iterator[tuple[str, str]]:
    """The keys of [[admin.keys]] and their variables, the most privileged first; "" if unset."""
    ranks: list[str] = ["all", "operate", "weights", "read"]
    for entry in sorted(admin.keys, key=lambda entry: ranks.index(entry.role)):
        yield os.environ.get(entry.key_env, "") if entry.key_env else "", entry.key_env


def _require_client_cert(config: Config, url: str, file: Path, client_cert: ClientCert) -> None:
    """Check before connecting that a client certificate is given if the file requires one.
    Raises AdminClientError."""
    server = config.server
    requires_cert = server.tls_client_ca and server.tls_client_require and url.startswith("https:")
    if requires_cert and not client_cert.cert:
        raise AdminClientError(
            f"{file}: a client certificate is required ([server] tls_client_ca is "
            f"{server.tls_client_ca}): pass --client-cert FILE and --client-key FILE"
        )


def config_of(arguments: argparse.Namespace) -> tuple[Config | None, str]:
    """The configuration of --config FILE, if given, and why the proxy would refuse it, else "".

    From a broken file only the keys that locate the proxy are read; the running proxy keeps its
    configuration. Raises AdminClientError.
    """
    file: Path | None = arguments.config
    if not file:
        return None, ""
    try:
        return read_file(file), ""
    except ConfigError as error:
        first, *more = str(error).splitlines()
        count = f" (and {len(more)} more: omni-proxy check {file})" if more else ""
        try:
            return salvage_config(file.read_bytes(), error), f"{first}{count}"
        except (OSError, ConfigError):
            message = f"{error}\nfix it, or pass the running proxy's address with --url URL"
            raise AdminClientError(message) from None


def _url_of(config: Config, file: Path) -> str:
    """The URL of the listener with the admin routes."""
    listen = config.admin.listen or config.server.host
    if listen.startswith("unix:"):
        return listen
    host, port = config.server.host, config.server.port
    if config.admin.listen:
        host, port = listen.rpartition(":")[0].strip("[]"), int(listen.rpartition(":")[2])
    if port == 0:
        raise AdminClientError(
            f"{file} has port 0, any free port: see the proxy's log for `listener_opened`, and "
            "pass its url with --url URL"
        )
    host = ANY_ADDRESS.get(host, host)
    scheme = "https" if config.server.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def normalize_admin_url(url: str, scheme: str = "http") -> str:
    """The URL, with scheme and host added to short forms like `10.0.0.1:30000` and `:30000`."""
    if url.startswith("unix:"):
        return url
    if url.startswith(":"):
        url = f"127.0.0.1{url}"
    return (url if _SCHEME.match(url) else f"{scheme}://{url}").rstrip("/")


class AdminClient:
    """A client of the proxy at `target`; a context manager."""

    def __init__(self, target: AdminTarget, answer_secs: float = ANSWER_SECS) -> None:
        """Raises AdminClientError for an invalid URL."""
        import httpx

        self.target = target
        # A command reports the result of a change, so it waits for its end (RFC 7240).
        agent = f"omni-proxy-cli/{__version__}".encode()
        headers = [(b"user-agent", agent), (b"prefer", b"wait")]
        if target.key:
            headers.append((b"authorization", f"Bearer {target.key}".encode()))
        socket = target.url.removeprefix("unix:") if target.url.startswith("unix:") else None
        secure = target.url.startswith("https:")
        try:
            trusted = (
                create_tls_context(target.client_cert, target.certificate) if secure else False
            )
            self._client = httpx.Client(
                base_url="http://localhost" if socket else target.url,
                transport=httpx.HTTPTransport(uds=socket, verify=trusted),
                timeout=httpx.Timeout(answer_secs, connect=min(CONNECT_SECS, answer_secs)),
                headers=headers,
                trust_env=False,  # HTTP_PROXY must not apply here
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise AdminClientError(f"{target.url} is not a URL: {error}; {_WHERE}") from None
        except ClientCertError as error:
            raise AdminClientError(str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> AdminReply:
        """Raises AdminClientError."""
        with self._translate_errors():
            return self._read(self._client.get(path, params=query))

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AdminReply:
        """`body` goes as JSON. Raises AdminClientError."""
        with self._translate_errors():
            return self._read(
                self._client.request(method, path, json=body, params=query, headers=headers)
            )

    def post_bytes(self, path: str, body: bytes, headers: Mapping[str, str]) -> AdminReply:
        """`path` includes the query. Raises AdminClientError."""
        with self._translate_errors():
            return self._read(self._client.post(path, content=body, headers=dict(headers)))

    @contextmanager
    def lines(self, path: str) -> Iterator[Iterator[str]]:
        """The lines of an endless response. Raises AdminClientError, also while iterating."""
        with self._translate_errors(), self._client.stream("GET", path) as response:
            if not response.is_success:
                response.read()
                raise AdminClientError(self._read(response).refusal)
            yield response.iter_lines()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        import httpx

        url = self.target.url
        try:
            yield
        except httpx.ConnectError as error:
            message = str(error)
            raise AdminClientError(
                explain_tls_error(url, message, self.target.client_cert)
                or f"cannot connect to {url} ({strip_noise(message)}); {_WHERE}"
            ) from None
        except httpx.TimeoutException:
            raise AdminClientError(f"{url}: no response in time") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            message = str(error) or type(error).__name__
            raise AdminClientError(
                explain_tls_error(url, message, self.target.client_cert)
                or f"{url}: request failed: {message}; {_WHERE}"
            ) from None

    def _read(self, response: httpx.Response) -> AdminReply:
        try:
            body = response.json()
        except ValueError:
            body = None
        error = body.get("error") if isinstance(body, dict) else None
        # A worker does not have the admin routes, and its 404 has another body.
        strange = response.status_code in (404, 405) and not isinstance(error, dict)
        if not isinstance(body, dict) or strange:
            raise AdminClientError(
                f"{self.target.url} answers with status {response.status_code}, but is not an "
                f"omni-proxy; is it a worker? {_WHERE}"
            )
        code = error.get("code") if isinstance(error, dict) else None
        if code == "admin_key_required":
            raise AdminClientError(
                f"{self.target.url} requires the admin key: pass --api-key KEY, set "
                f"{KEY_VARIABLE}, or pass the proxy's file with --config FILE"
            )
        if code == "admin_key_invalid":
            raise AdminClientError(
                f"{self.target.url} rejects the admin key from {self.target.key_from}"
            )
        if code == "role_not_allowed":
            roles = " or ".join(printable(role) for role in body.get("roles") or ["another"])
            raise AdminClientError(
                f"the admin key from {self.target.key_from} has the role "
                f"{printable(body.get('role'))}; this needs {roles}"
            )
        return AdminReply(response.status_code, body)
