"""TLS contexts from PEM files, for listeners and for connections to workers and to a proxy.

Invariant: a context is built whole or not at all, so broken or half-written files never replace
those in use. No password prompt appears on the terminal; the options are those of `tls_client`. An
unusable file raises `PemError`; `check_tls_files` converts each into a problem of the configuration
key that names the file.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final, Literal

from omni_proxy.config.problem import ConfigError, Problem
from omni_proxy.config.schema import Config, ServerConfig
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.shared.tls_client import (
    context_of_the_system,
    context_without_authorities,
    system_context,
    with_common_options,
)
from omni_proxy.system.files import FileSignature, file_signature

_log = logging.getLogger(__name__)

PemRole = Literal["cert", "key", "ca"]


class PemError(Exception):
    """A PEM file that can't be used; `reason` is a phrase that follows the name of the file."""

    def __init__(self, role: PemRole, file: str, reason: str) -> None:
        super().__init__(f"{file} {reason}")
        self.role = role
        self.file = file
        self.reason = reason


def load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Load a certificate and its key; with `key` "" the key is in the file of the certificate.

    Raises PemError naming the file that is wrong.
    """
    _require_readable("cert", cert)
    if key:
        _require_readable("key", key)
    try:
        context.load_cert_chain(cert, key or None, _refuse_password)
    except (ssl.SSLError, ValueError) as error:
        raise _certificate_error(cert, key, error) from None


def load_authorities(context: ssl.SSLContext, file: str) -> None:
    """Trust the certificates of a PEM file. Raises PemError."""
    _require_readable("ca", file)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        reason = f"holds no certificates in PEM form: {tls_error_text(error)}"
        raise PemError("ca", file, reason) from None


def _require_readable(role: PemRole, file: str) -> None:
    """Raises PemError with the file, which OpenSSL's own error does not name."""
    try:
        Path(file).read_bytes()
    except OSError as error:
        raise PemError(role, file, f"cannot be read: {error.strerror}") from None


def _certificate_error(cert: str, key: str, error: Exception) -> PemError:
    """The error with the wrong one of the two files, which OpenSSL's error does not name."""
    key_file = key or cert
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return PemError("key", key_file, f"is not the key of the certificate in {cert}")
    if "-----BEGIN CERTIFICATE-----" not in Path(cert).read_text(errors="replace"):
        return PemError("cert", cert, "can't be used: holds no certificate in PEM form")
    text = Path(key_file).read_text(errors="replace")
    if isinstance(error, _PasswordRequired) or "ENCRYPTED" in text:
        return PemError("key", key_file, "is encrypted: name a key without a password")
    if "PRIVATE KEY-----" not in text:
        return PemError("key", key_file, "holds no key in PEM form")
    return PemError("cert", cert, f"can't be used: {tls_error_text(error)}")


class _PasswordRequired(ValueError):
    """OpenSSL asked for a password."""


def _refuse_password() -> bytes:
    raise _PasswordRequired  # without a callback OpenSSL would prompt at the terminal


def tls_error_text(error: BaseException) -> str:
    """OpenSSL's reason without its numbers and its C source line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and reason:
        return reason.replace("_", " ").lower()
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def listener_tls_files(server: ServerConfig) -> tuple[str, ...]:
    """The files that `server_context` reads."""
    files = (server.tls_cert, server.tls_key, server.tls_client_ca)
    return tuple(file for file in files if file)


def picker_tls(config: Config) -> ServerConfig | None:
    """The files of the gRPC listener, under the names of `[server]`; None without TLS."""
    picker = config.picker
    if not picker.grpc_tls_cert:
        return None
    return ServerConfig(
        tls_cert=picker.grpc_tls_cert,
        tls_key=picker.grpc_tls_key,
        tls_client_ca=picker.grpc_tls_client_ca,
    )


def server_context(server: ServerConfig, prefix: str = "server.") -> ssl.SSLContext:
    """The context of listeners with `tls_cert`. Raises ConfigError naming the keys whose files are
    wrong; `prefix` is that of the keys."""
    problems = list(_server_problems(server, prefix))
    if problems:
        raise ConfigError(problems, "")
    context = _new_server_context()
    load_certificate(context, server.tls_cert, server.tls_key)
    if server.tls_client_ca:
        load_authorities(context, server.tls_client_ca)
        required = server.tls_client_require
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def check_tls_files(config: Config, file: str) -> None:
    """Raises ConfigError with every PEM file that can't be used; `file` is the configuration."""
    problems = list(_server_problems(config.server)) if config.server.tls_cert else []
    picker = picker_tls(config)
    if picker is not None:
        problems += _server_problems(picker, "picker.grpc_")
    keys = {("server.tls_worker_ca", config.server.tls_worker_ca): None}
    for index, entry in enumerate(config.workers):
        keys[f"workers[{index}].tls_ca", entry.tls_ca] = None
    for key, ca in keys:
        if ca:
            problems += _authorities_problems(key, ca)
    for index, source in enumerate(config.discover):
        problems += _discovery_problems(source, f"discover[{index}]")
    if problems:
        raise ConfigError([replace(problem, file=file) for problem in problems], file)


def _discovery_problems(entry: DiscoverEntry, key: str) -> Iterator[Problem]:
    if entry.ca_file:
        yield from _authorities_problems(f"{key}.ca_file", entry.ca_file)
    if entry.client_cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            load_certificate(context, entry.client_cert, entry.client_key)
        except PemError as error:
            role = "client_key" if error.role == "key" else "client_cert"
            yield Problem(f"{key}.{role}", None, str(error))


def _server_problems(server: ServerConfig, prefix: str = "server.") -> Iterator[Problem]:
    files: tuple[tuple[PemRole, str], ...] = (("cert", server.tls_cert), ("key", server.tls_key))
    readable = True
    for role, file in files:
        try:
            _require_readable(role, file)
        except PemError as error:
            readable = False
            yield Problem(f"{prefix}tls_{role}", None, str(error))
    if readable:
        try:
            load_certificate(_new_server_context(), server.tls_cert, server.tls_key)
        except PemError as error:
            yield Problem(f"{prefix}tls_{error.role}", None, str(error))
    if server.tls_client_ca:
        yield from _authorities_problems(f"{prefix}tls_client_ca", server.tls_client_ca)


def _authorities_problems(key: str, file: str) -> Iterator[Problem]:
    try:
        load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), file)
    except PemError as error:
        yield Problem(key, None, str(error))


class _CachedContext:
    """The context of one CA file, and the signature of the file that it was read from."""

    def __init__(self, context: ssl.SSLContext, signature: FileSignature | None) -> None:
        self.context = context
        self.signature = signature


_context_cache: Final[dict[str, _CachedContext]] = {}


def client_context(ca: str, *, verify: bool) -> ssl.SSLContext:
    """The context for connections to workers. `ca` is a PEM file; "" trusts the system's
    authorities.

    Returns the same object until the file changes; if the file becomes unusable, it returns the
    last usable context. Raises OSError for a file that was never usable.
    """
    if not verify:
        return _unverified_context()
    if not ca:
        return system_context()
    cached, signature = _context_cache.get(ca), file_signature(ca)
    if cached is not None and cached.signature == signature:
        return cached.context
    try:
        context = context_without_authorities()
        context.load_verify_locations(ca)
    except OSError as error:
        if cached is None:
            raise OSError(f"tls_ca {ca} can't be used: {tls_error_text(error)}") from None
        reason = tls_error_text(error)
        _log.error("tls_ca_refused file=%s error=%s action=kept_previous", ca, reason)
        cached.signature = signature
        return cached.context
    _context_cache[ca] = _CachedContext(context, signature)
    return context


def new_client_context(ca: str = "") -> ssl.SSLContext:
    """A context that no other connection shares, so that a certificate may be added to it.

    Raises PemError.
    """
    if ca:
        context = context_without_authorities()
        load_authorities(context, ca)
        return context
    return context_of_the_system()


def pinned_context(certificate: str) -> ssl.SSLContext:
    """The context for a server with exactly this certificate, under any name. Raises PemError."""
    context = context_without_authorities()
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    load_authorities(context, certificate)
    return context


def _new_server_context() -> ssl.SSLContext:
    context = with_common_options(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


@cache
def _unverified_context() -> ssl.SSLContext:
    context = context_without_authorities()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
