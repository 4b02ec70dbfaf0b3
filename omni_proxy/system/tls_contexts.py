"""What TLS believes and shows: contexts out of PEM files, for our listeners and towards workers.

Invariant: a context is built whole or not at all, so that files which are broken or half-written
never replace those in use; TLS 1.2 is the oldest version, and only HTTP/1.1 is offered.
`check_tls_files` says of each file that can't be used which key names it and what is wrong.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import httpx

from omni_proxy.config.problem import ConfigError, Problem
from omni_proxy.config.schema import Config, ServerConfig

_log = logging.getLogger(__name__)

PROTOCOLS: Final = ["http/1.1"]
FileSignature = tuple[int, int, int]


def file_signature(path: str | os.PathLike[str]) -> FileSignature | None:
    """What changes when the content may have; None while the file can't be reached."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def listener_tls_files(server: ServerConfig) -> tuple[str, ...]:
    """The files that the listener's context is made of."""
    named = (server.tls_cert, server.tls_key, server.tls_client_ca)
    return tuple(file for file in named if file)


def server_context(server: ServerConfig) -> ssl.SSLContext:
    """Of a listener with `tls_cert`. Raises ConfigError naming the key that is to blame."""
    problems = list(_server_problems(server))
    if problems:
        raise ConfigError(problems, "")
    context = _plain_server_context()
    context.load_cert_chain(server.tls_cert, server.tls_key, _no_password)
    if server.tls_client_ca:
        context.load_verify_locations(server.tls_client_ca)
        required = server.tls_client_require
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def check_tls_files(config: Config, file: str) -> None:
    """Whether every file that TLS needs can be used. Raises ConfigError with all that can't be;
    `file` is where they are named."""
    problems = list(_server_problems(config.server)) if config.server.tls_cert else []
    named = {("server.tls_worker_ca", config.server.tls_worker_ca): None}
    for index, entry in enumerate(config.workers):
        named[f"workers[{index}].tls_ca", entry.tls_ca] = None
    for key, authorities in named:
        if authorities and (why := _authorities_fault(authorities)):
            problems.append(_problem(key, authorities, why))
    if problems:
        raise ConfigError([replace(problem, file=file) for problem in problems], file)


def _plain_server_context() -> ssl.SSLContext:
    context = _modern(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def _server_problems(server: ServerConfig) -> Iterator[Problem]:
    unread = False
    for key in ("tls_cert", "tls_key"):
        file = getattr(server, key)
        if why := _unreadable(file):
            unread = True
            yield _problem(f"server.{key}", file, why)
    if not unread:
        try:
            _plain_server_context().load_cert_chain(server.tls_cert, server.tls_key, _no_password)
        except (ssl.SSLError, ValueError) as error:
            yield _pair_fault(server, error)
    if server.tls_client_ca and (why := _authorities_fault(server.tls_client_ca)):
        yield _problem("server.tls_client_ca", server.tls_client_ca, why)


def _pair_fault(server: ServerConfig, error: Exception) -> Problem:
    """Which of the two is wrong: OpenSSL alone does not tell."""
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        why = f"is not the key of the certificate in {server.tls_cert}"
        return _problem("server.tls_key", server.tls_key, why)
    if "-----BEGIN CERTIFICATE-----" not in Path(server.tls_cert).read_text(errors="replace"):
        return _problem("server.tls_cert", server.tls_cert, "holds no certificate in PEM form")
    text = Path(server.tls_key).read_text(errors="replace")
    if isinstance(error, _Encrypted) or "ENCRYPTED" in text:
        why = "is encrypted, and nobody is here to be asked for its password"
        return _problem("server.tls_key", server.tls_key, why)
    if "PRIVATE KEY-----" not in text:
        return _problem("server.tls_key", server.tls_key, "holds no key in PEM form")
    return _problem("server.tls_cert", server.tls_cert, f"can't be used: {tls_error_text(error)}")


class _Encrypted(ValueError):
    """OpenSSL asked for a password."""


def _no_password() -> bytes:
    raise _Encrypted  # else OpenSSL would ask at the terminal


def _authorities_fault(file: str) -> str:
    if why := _unreadable(file):
        return why
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError as error:
        return f"holds no certificates in PEM form: {tls_error_text(error)}"
    return ""


def _unreadable(file: str) -> str:
    try:
        Path(file).read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def _problem(key: str, file: str, why: str) -> Problem:
    return Problem(key, None, f"{file} {why}")


def tls_error_text(error: BaseException) -> str:
    """OpenSSL's words without its numbers and the line of C that said them."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and reason:
        return reason.replace("_", " ").lower()
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


class _Kept:
    """The context of one file of authorities, and the state of the file it was made of."""

    def __init__(self, context: ssl.SSLContext, seen: FileSignature | None) -> None:
        self.context = context
        self.seen = seen


_kept: Final[dict[str, _Kept]] = {}


def client_context(ca: str, *, verify: bool) -> ssl.SSLContext:
    """Towards workers. `ca` names a PEM file, "" the authorities of this system.

    The same object while the file stays as it is; one that got unusable leaves the last good one in
    place. Raises OSError for a file that was never usable.
    """
    if not verify:
        return _unverified()
    if not ca:
        return _of_the_system()
    kept, seen = _kept.get(ca), file_signature(ca)
    if kept is not None and kept.seen == seen:
        return kept.context
    try:
        fresh = _client_context()
        fresh.load_verify_locations(ca)
    except OSError as error:
        if kept is None:
            raise OSError(f"tls_ca {ca} can't be used: {tls_error_text(error)}") from None
        _log.error(
            "tls_ca %s can't be used any more, what it said stays: %s", ca, tls_error_text(error)
        )
        kept.seen = seen
        return kept.context
    _kept[ca] = _Kept(fresh, seen)
    return fresh


def _client_context() -> ssl.SSLContext:
    return _modern(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # verifies certificate and name


def _modern(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Python before 3.11.4 takes a cut connection for an end that the peer has told.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    context.set_alpn_protocols(PROTOCOLS)
    return context


@cache
def _of_the_system() -> ssl.SSLContext:
    # Loading the bundle costs some 20 ms: once per program, and only with an https worker.
    places = ssl.get_default_verify_paths()
    if places.cafile or (places.capath and os.listdir(places.capath)):
        context = _client_context()
        context.set_default_verify_paths()
        return context
    # A bare container, or a binary that was built elsewhere: those that come with httpx.
    return _modern(httpx.create_ssl_context(trust_env=False))


@cache
def _unverified() -> ssl.SSLContext:
    context = _client_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def pinned_context(certificate: str) -> ssl.SSLContext:
    """Towards whoever shows this very certificate, by whatever name. Raises OSError."""
    context = _client_context()
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context
