"""TLS of the client commands: trusted CAs, the client certificate, and readable TLS errors.

Invariant: a context is built completely or not at all; every error, also one sent by the server as
an alert, names the flag that fixes it.
"""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from typing import Final

from omni_proxy.system.tls_contexts import (
    PemError,
    client_context,
    load_certificate,
    new_client_context,
    pinned_context,
)

# OpenSSL's reasons for the server's alerts about the client certificate.
_CERT_REQUIRED: Final = ("CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE", "NO_CERTIFICATE")
_CERT_REJECTED: Final = (
    "ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_UNSUPPORTED_CERTIFICATE",
    "ALERT_CERTIFICATE_EXPIRED", "ALERT_CERTIFICATE_REVOKED", "ALERT_CERTIFICATE_UNKNOWN",
)  # fmt: skip
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


class ClientCertError(Exception):
    """An unusable certificate file; the text has its flag, the file and the reason."""


@dataclass(frozen=True, slots=True)
class ClientCert:
    """PEM files, "" if not given; without a `key` it is in the file of the certificate."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def __bool__(self) -> bool:
        return bool(self.ca or self.cert or self.key)


NO_CLIENT_CERT: Final = ClientCert()


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS, if the proxy uses it")
    group.add_argument(
        "--client-cert", metavar="FILE", default="", help="the client certificate, PEM"
    )
    group.add_argument(
        "--client-key", metavar="FILE", default="", help="its key (default: in the same file)"
    )
    group.add_argument(
        "--ca", metavar="FILE", default="",
        help="CA file for the proxy's certificate (default: this system's authorities)",
    )  # fmt: skip


def client_cert_of(arguments: argparse.Namespace) -> ClientCert:
    return ClientCert(arguments.ca, arguments.client_cert, arguments.client_key)


def create_tls_context(client_cert: ClientCert, pinned: str = "") -> ssl.SSLContext:
    """The context for connections to a proxy; `pinned` is the file of its certificate, if known.

    Raises ClientCertError.
    """
    if client_cert.key and not client_cert.cert:
        raise ClientCertError("--client-key needs --client-cert FILE, too")
    try:
        if client_cert.ca:
            context = new_client_context(client_cert.ca)
        elif pinned:
            context = pinned_context(pinned)
        elif client_cert.cert:
            context = new_client_context()
        else:
            return client_context("", verify=True)
    except PemError as error:
        flag = "--ca" if client_cert.ca else "the proxy's certificate"
        raise ClientCertError(f"{flag} {error}") from None
    if client_cert.cert:
        _load_client_certificate(context, client_cert)
    return context


def _load_client_certificate(context: ssl.SSLContext, client_cert: ClientCert) -> None:
    """Raises ClientCertError."""
    try:
        load_certificate(context, client_cert.cert, client_cert.key)
    except PemError as error:
        flag = "--client-key" if error.role == "key" and client_cert.key else "--client-cert"
        hint = "" if client_cert.key or error.role != "key" else "; --client-key FILE names another"
        raise ClientCertError(f"{flag} {error}{hint}") from None


def explain_tls_error(url: str, message: str, client_cert: ClientCert) -> str:
    """A readable TLS error with its remedy; "" if `message` is not a TLS error."""
    if "CERTIFICATE_VERIFY_FAILED" in message:
        cause = message.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        if "mismatch" in cause:
            return f"the certificate of {url} is for another name ({cause}): use a name in it"
        issuer = f"no authority in {client_cert.ca}" if client_cert.ca else "no known authority"
        return f"{issuer} signed the certificate of {url} ({cause}): pass its CA with --ca FILE"
    if any(reason in message for reason in _CERT_REJECTED):
        cause = message.rpartition("alert ")[2].partition(" (_ssl")[0]
        return (
            f"{url} does not accept the certificate {client_cert.cert or 'that was sent'} ({cause})"
        )
    if any(reason in message for reason in _CERT_REQUIRED):
        if client_cert.cert:
            return f"{url} does not accept the client certificate {client_cert.cert}"
        return f"{url} requires a client certificate: pass --client-cert FILE"
    if any(reason in message for reason in _NOT_TLS):
        return f"{url} does not use TLS: use http://"
    return ""
