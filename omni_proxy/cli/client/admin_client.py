"""How a command finds the running proxy, and asks it.

Invariant: whatever keeps a command from being answered by an omni-proxy is a `AdminClientError`,
whose text says what to do about it; what the proxy itself says, yes or no, is an `AdminReply`.

What a refused configuration file still says of where its proxy is, and which key that takes.

A proxy that runs goes on when its file is broken, and is to be found just then. Invariant: a key
that decides where a request, and with it the admin key, goes to is never guessed: where it stands
in the file and can't be read, the whole file is refused. PURE.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from omni_proxy import __version__
from omni_proxy.cli.client.tls_options import (
    NO_CLIENT_CERT,
    ClientCert,
    ClientCertError,
    add_tls_arguments,
    client_cert_of,
    create_tls_context,
    explain_tls_error,
)
from omni_proxy.cli.screen.text_table import printable, strip_noise
from omni_proxy.config.parse import ConfigError, decode_text
from omni_proxy.config.schema import Config
from omni_proxy.config.validate import Finding, walk
from omni_proxy.runtime_config.config_store import read_file

if TYPE_CHECKING:
    import httpx

TABLES: Final = ("server", "admin")
DECIDING: Final = frozenset(
    (
        ("server", "host"), ("server", "port"), ("server", "tls_cert"), ("server", "tls_key"),
        ("server", "tls_client_ca"), ("server", "tls_client_require"), ("admin", "listen"),
        ("server", "api_key"), ("admin", "api_key"),
    )
)  # fmt: skip
_HEADER: Final = re.compile(r"\s*\[+\s*([^]#]*?)\s*\]+\s*(?:#.*)?$")
_KEY: Final = re.compile(r"\s*(?:(\w+)\s*\.\s*)?(\w+)\s*=")
_NAMES: Final = frozenset(name for _, name in DECIDING)
_MENTION: Final = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(_NAMES))})[\"']?\s*(?:=|$)")


def salvage_config(raw: bytes, refusal: ConfigError) -> Config:
    """[server] and [admin], without the keys that are wrong. Raises the refusal."""
    try:
        text = decode_text(raw, "")
    except ConfigError:
        raise refusal from None
    try:
        told: Mapping[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError):
        told = _line_by_line(text, refusal)
    if any(_is_misplaced(name, value) for name, value in told.items()):
        raise refusal
    kept: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        keys = told.get(table, {})
        if not isinstance(keys, Mapping):
            raise refusal
        for key, value in keys.items():
            seen, findings = walk({table: {key: value}}, Config)
            if not findings:
                kept.setdefault(table, {}).update(seen[table])
            elif (table, key) in DECIDING or _may_be_meant(table, findings, keys):
                raise refusal
    return msgspec.convert(kept, Config)


def _is_misplaced(name: str, value: object) -> bool:
    """Whether it holds a deciding key and is no table of ours: one that was meant for [server]?"""
    if name in Config.__struct_fields__:
        return False
    return name in _NAMES or (isinstance(value, Mapping) and not _NAMES.isdisjoint(value))


def _may_be_meant(table: str, findings: list[Finding], keys: Mapping[str, Any]) -> bool:
    """Whether an unknown key is a slip for a deciding one, which is missing."""
    missing = [name for where, name in DECIDING if where == table and name not in keys]
    return any(f"`{name}`" in hint for _, _, hint in findings for name in missing)


def _line_by_line(text: str, refusal: ConfigError) -> dict[str, dict[str, Any]]:
    """Of a text that is no TOML: each line of the two tables that is some for itself."""
    found: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    table = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            table = header[1].strip("\"'")
            continue
        if line.lstrip().startswith("["):
            table = ""  # a header that can't be read
        key = _KEY.match(line)
        where, name = (table or key[1], key[2]) if key and not (table and key[1]) else ("", "")
        try:
            if where not in TABLES or key is None:
                raise ValueError
            found[where][name] = tomllib.loads(line[key.start(2) :])[name]
        except (ValueError, KeyError, RecursionError):
            if _may_decide(table, line):
                raise refusal from None
    return found


def _may_decide(table: str, line: str) -> bool:
    """Whether a line that says nothing readable may be meant for a deciding key."""
    other = table not in TABLES and table.partition(".")[0] in Config.__struct_fields__
    return not other and _MENTION.search(line.partition("#")[0]) is not None


DEFAULT_URL: Final = "http://127.0.0.1:30000"
KEY_VARIABLE: Final = "SGLANG_OMNI_ADMIN_KEY"
ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to listen on, not to dial
CONNECT_SECS: Final = 5.0
ANSWER_SECS: Final = 15.0
NO_SUCH_PLACE: Final = 2  # exit status of every command that could not ask
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_WHERE: Final = "name it with --url URL, or the file that it runs with by --config FILE"

JsonObject = dict[str, Any]


class AdminClientError(Exception):
    """Nobody who could answer; the text tells why and how to mend it."""


@dataclass(frozen=True, slots=True)
class AdminTarget:
    """Where the proxy is; `key_from` says in words where its key came from. `certificate` is the
    file of the one that it shows, where we know it; `papers` are ours."""

    url: str
    key: str = ""
    key_from: str = ""
    certificate: str = ""
    papers: ClientCert = NO_CLIENT_CERT


@dataclass(frozen=True, slots=True)
class AdminReply:
    """What an omni-proxy said; `refusal` is "" where it said yes."""

    status: int
    told: JsonObject

    @property
    def refusal(self) -> str:
        error = self.told.get("error")
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
        return "" if self.status < 400 else f"status {self.status}"


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The words by which every command finds the proxy."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", metavar="URL", help=f"the proxy, or unix:PATH (default {DEFAULT_URL})"
    )
    where.add_argument(
        "--config", metavar="FILE", type=Path, help="the proxy that runs with this file"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"the admin key; else the file's, else {KEY_VARIABLE}"
    )
    add_tls_arguments(parser)


def with_default_command(argv: Sequence[str], default: str) -> list[str]:
    """The command first, wherever it stands among the words that say which proxy is meant.

    What only looks needs no word of its own: `default` is its command.
    """
    if argv and argv[0] in ("-h", "--help"):
        return list(argv)
    place = argparse.ArgumentParser(add_help=False)
    add_target_arguments(place)
    valued = {word for action in place._actions for word in action.option_strings}
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        if argv[at] in valued:
            at += 1
        elif argv[at] != "--json" and argv[at].partition("=")[0] not in valued:
            break
        at += 1
    if at < len(argv) and not argv[at].startswith("-"):
        return [argv[at], *argv[:at], *argv[at + 1 :]]
    return [default, *argv]


def admin_target_of(arguments: argparse.Namespace) -> AdminTarget:
    """Raises AdminClientError."""
    papers = client_cert_of(arguments)
    config, broken = config_of(arguments)
    if broken:
        print(
            f"warning: {printable(broken)}; the running proxy keeps its configuration",
            file=sys.stderr,
        )
    if config is not None:
        url = _url_of(config, arguments.config)
        _require_papers(config, url, arguments.config, papers)
    else:
        typed = arguments.url or DEFAULT_URL.removeprefix("http://")
        url = normalize_admin_url(typed, "https" if papers else "http")
    if papers and url.startswith("http:"):
        raise AdminClientError(
            f"{url} is asked without TLS, so leave --ca and --client-cert out, or "
            "name it by https://"
        )
    keys = (
        (arguments.api_key or "", "--api-key"),
        ((config.admin.api_key or config.server.api_key) if config else "", str(arguments.config)),
        (os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE),
    )
    key, key_from = next((found for found in keys if found[0]), ("", ""))
    return AdminTarget(url, key, key_from, config.server.tls_cert if config else "", papers)


def _require_papers(config: Config, url: str, file: Path, papers: ClientCert) -> None:
    """Whoever has the file knows who is let in, and needs no refusal to tell. Raises
    AdminClientError."""
    server = config.server
    asks = server.tls_client_ca and server.tls_client_require and url.startswith("https:")
    if asks and not papers.cert:
        raise AdminClientError(
            f"{file}: only clients with a certificate are let in ([server] tls_client_ca is "
            f"{server.tls_client_ca}): name yours by --client-cert FILE and --client-key FILE"
        )


def config_of(arguments: argparse.Namespace) -> tuple[Config | None, str]:
    """What --config FILE says, where it is there, and why the proxy would refuse it, "" if not.

    Of a broken file what is needed to find the proxy, which goes on with what it had. Raises
    AdminClientError.
    """
    file: Path | None = arguments.config
    if not file:
        return None, ""
    try:
        return read_file(file), ""
    except ConfigError as refusal:
        first, *more = str(refusal).splitlines()
        count = f" (and {len(more)} more: omni-proxy check {file})" if more else ""
        try:
            return salvage_config(file.read_bytes(), refusal), f"{first}{count}"
        except (OSError, ConfigError):
            message = f"{refusal}\nmend it, or name the running proxy with --url URL"
            raise AdminClientError(message) from None


def _url_of(config: Config, file: Path) -> str:
    """Of the listener that takes control requests."""
    listen = config.admin.listen or config.server.host
    if listen.startswith("unix:"):
        return listen
    host, port = config.server.host, config.server.port
    if config.admin.listen:
        host, port = listen.rpartition(":")[0].strip("[]"), int(listen.rpartition(":")[2])
    if port == 0:
        raise AdminClientError(
            f"{file} lets the proxy take any free port: see its log for `listening on`, and name "
            "that with --url URL"
        )
    host = ANY_ADDRESS.get(host, host)
    scheme = "https" if config.server.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def normalize_admin_url(url: str, scheme: str = "http") -> str:
    """With its scheme and host: `10.0.0.1:30000` and `:30000` are what people type."""
    if url.startswith("unix:"):
        return url
    if url.startswith(":"):
        url = f"127.0.0.1{url}"
    return (url if _SCHEME.match(url) else f"{scheme}://{url}").rstrip("/")


class AdminClient:
    """A connection to the proxy at a place; closed by its `with`."""

    def __init__(self, place: AdminTarget, answer_secs: float = ANSWER_SECS) -> None:
        """Raises AdminClientError for a URL that is none."""
        import httpx

        self.place = place
        # A command tells what came of a change, so it waits for the end of that (RFC 7240).
        agent = f"omni-proxy-cli/{__version__}".encode()
        headers = [(b"user-agent", agent), (b"prefer", b"wait")]
        if place.key:
            headers.append((b"authorization", f"Bearer {place.key}".encode()))
        socket = place.url.removeprefix("unix:") if place.url.startswith("unix:") else None
        secure = place.url.startswith("https:")
        try:
            trusted = create_tls_context(place.papers, place.certificate) if secure else False
            self._client = httpx.Client(
                base_url="http://localhost" if socket else place.url,
                transport=httpx.HTTPTransport(uds=socket, verify=trusted),
                timeout=httpx.Timeout(answer_secs, connect=min(CONNECT_SECS, answer_secs)),
                headers=headers,
                trust_env=False,  # no HTTP_PROXY between an operator and his proxy
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise AdminClientError(f"{place.url} is no URL: {error}; {_WHERE}") from None
        except ClientCertError as fault:
            raise AdminClientError(str(fault)) from None

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
        with self._asking():
            return self._read(self._client.get(path, params=query))

    def send(
        self, method: str, path: str, body: object = None, query: Mapping[str, str] | None = None
    ) -> AdminReply:
        """`body` goes as JSON. Raises AdminClientError."""
        with self._asking():
            return self._read(self._client.request(method, path, json=body, params=query))

    def post_bytes(self, path: str, body: bytes, headers: Mapping[str, str]) -> AdminReply:
        """`path` with its query. Raises AdminClientError."""
        with self._asking():
            return self._read(self._client.post(path, content=body, headers=dict(headers)))

    @contextmanager
    def lines(self, path: str) -> Iterator[Iterator[str]]:
        """The lines of an answer without an end. Raises AdminClientError, also while they are
        read."""
        with self._asking(), self._client.stream("GET", path) as answer:
            if not answer.is_success:
                answer.read()
                raise AdminClientError(self._read(answer).refusal)
            yield answer.iter_lines()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        import httpx

        url = self.place.url
        try:
            yield
        except httpx.ConnectError as error:
            said = str(error)
            raise AdminClientError(
                explain_tls_error(url, said, self.place.papers)
                or f"cannot connect to {url} ({strip_noise(said)}); {_WHERE}"
            ) from None
        except httpx.TimeoutException:
            raise AdminClientError(f"{url} does not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            said = str(error) or type(error).__name__
            raise AdminClientError(
                explain_tls_error(url, said, self.place.papers)
                or f"{url} can't be asked: {said}; {_WHERE}"
            ) from None

    def _read(self, answer: httpx.Response) -> AdminReply:
        try:
            told = answer.json()
        except ValueError:
            told = None
        error = told.get("error") if isinstance(told, dict) else None
        # A worker knows none of our routes, and says so in words of its own.
        strange = answer.status_code in (404, 405) and not isinstance(error, dict)
        if not isinstance(told, dict) or strange:
            raise AdminClientError(
                f"{self.place.url} answers (status {answer.status_code}), but not as an "
                f"omni-proxy: is it a worker? {_WHERE}"
            )
        code = error.get("code") if isinstance(error, dict) else None
        if code == "admin_key_required":
            raise AdminClientError(
                f"{self.place.url} wants its admin key: give it by --api-key KEY, by "
                f"{KEY_VARIABLE}, or name the proxy's file by --config FILE"
            )
        if code == "admin_key_invalid":
            raise AdminClientError(
                f"{self.place.url} has another admin key than the one from {self.place.key_from}"
            )
        return AdminReply(answer.status_code, told)
