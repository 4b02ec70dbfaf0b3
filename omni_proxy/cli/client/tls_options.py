"""TLS of whoever asks a proxy: in whom it believes, what it shows, and what went wrong.

Invariant: a context is built whole or not at all; why not, and what the other side had against us,
is told in words that name the flag which mends it.
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

# Reasons of OpenSSL: what the other side thinks of our certificate, by the alert that it sent.
_WANTS: Final = ("CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE", "NO_CERTIFICATE")
_DISLIKES: Final = (
    "ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_UNSUPPORTED_CERTIFICATE",
    "ALERT_CERTIFICATE_EXPIRED", "ALERT_CERTIFICATE_REVOKED", "ALERT_CERTIFICATE_UNKNOWN",
)  # fmt: skip
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


class ClientCertError(Exception):
    """A file of ours that can't be used; the text names its flag, the file and the reason."""


@dataclass(frozen=True, slots=True)
class ClientCert:
    """PEM files, "" where none was named; without a `key` it is in the file of the certificate."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def __bool__(self) -> bool:
        return bool(self.ca or self.cert or self.key)


NO_CLIENT_CERT: Final = ClientCert()


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS, where the proxy speaks it")
    group.add_argument(
        "--client-cert", metavar="FILE", default="", help="the certificate to show, as PEM"
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


def create_tls_context(papers: ClientCert, pinned: str = "") -> ssl.SSLContext:
    """For connections to a proxy; `pinned` is the file of the certificate that it shows, where that
    is known.

    Raises ClientCertError.
    """
    if papers.key and not papers.cert:
        raise ClientCertError("--client-key alone is not enough: name its --client-cert FILE, too")
    try:
        if papers.ca:
            context = new_client_context(papers.ca)
        elif pinned:
            context = pinned_context(pinned)
        elif papers.cert:
            context = new_client_context()
        else:
            return client_context("", verify=True)
    except PemError as error:
        flag = "--ca" if papers.ca else "the proxy's certificate"
        raise ClientCertError(f"{flag} {error}") from None
    if papers.cert:
        _load_client_certificate(context, papers)
    return context


def _load_client_certificate(context: ssl.SSLContext, papers: ClientCert) -> None:
    """Raises ClientCertError."""
    try:
        load_certificate(context, papers.cert, papers.key)
    except PemError as error:
        flag = "--client-key" if error.role == "key" and papers.key else "--client-cert"
        hint = "" if papers.key or error.role != "key" else "; --client-key FILE names another"
        raise ClientCertError(f"{flag} {error}{hint}") from None


def explain_tls_error(url: str, said: str, papers: ClientCert) -> str:
    """What an error of TLS means, with its cure; "" where `said` is none of TLS."""
    if "CERTIFICATE_VERIFY_FAILED" in said:
        why = said.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        if "mismatch" in why:
            return f"the certificate of {url} is for another name ({why}): ask by a name in it"
        whose = f"no authority in {papers.ca}" if papers.ca else "no authority that we know"
        return (
            f"{whose} vouches for the certificate of {url} ({why}): name the right one by --ca FILE"
        )
    if any(reason in said for reason in _DISLIKES):
        why = said.rpartition("alert ")[2].partition(" (_ssl")[0]
        return f"{url} does not accept the certificate {papers.cert or 'that we show'} ({why})"
    if any(reason in said for reason in _WANTS):
        if papers.cert:
            return f"{url} wants another client certificate than {papers.cert}"
        return f"{url} wants a client certificate: name yours by --client-cert FILE"
    if any(reason in said for reason in _NO_TLS):
        return f"{url} speaks no TLS: ask it by http://"
    return ""
