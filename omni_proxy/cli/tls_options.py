"""TLS of whoever asks a proxy: in whom it believes, what it shows, and what went wrong.

Invariant: a context is built whole or not at all; why not, and what the other side had against us,
is told in words that name the flag which mends it.
"""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omni_proxy.system.tls_contexts import client_context, pinned_context, tls_error_text

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


NO_PAPERS: Final = ClientCert()


def add_papers(parser: argparse.ArgumentParser) -> None:
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


def papers_of(arguments: argparse.Namespace) -> ClientCert:
    return ClientCert(arguments.ca, arguments.client_cert, arguments.client_key)


def context_of(papers: ClientCert, pinned: str = "") -> ssl.SSLContext:
    """Towards a proxy; `pinned` is the file of the certificate that it shows, where that is known.

    Raises ClientCertError.
    """
    if papers.key and not papers.cert:
        raise ClientCertError("--client-key alone is not enough: name its --client-cert FILE, too")
    if papers.ca:
        context = _read("--ca", papers.ca, lambda: ssl.create_default_context(cafile=papers.ca))
    elif pinned:
        context = _read("the proxy's certificate", pinned, lambda: pinned_context(pinned))
    elif papers.cert:
        context = ssl.create_default_context()  # the one below is everybody's
    else:
        return client_context("", verify=True)
    if papers.cert:
        _show(context, papers)
    return context


def _read(flag: str, file: str, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Raises ClientCertError."""
    _require(flag, file)
    try:
        return make()
    except ssl.SSLError as error:
        why = tls_error_text(error)
        raise ClientCertError(f"{flag} {file} holds no certificates in PEM form: {why}") from None


def _show(context: ssl.SSLContext, papers: ClientCert) -> None:
    """Raises ClientCertError."""
    _require("--client-cert", papers.cert)
    if papers.key:
        _require("--client-key", papers.key)
    elif "PRIVATE KEY-----" not in Path(papers.cert).read_text(errors="replace"):
        raise ClientCertError(
            f"--client-cert {papers.cert} has no key in it: name --client-key FILE"
        )
    named = f"--client-key {papers.key}" if papers.key else f"--client-cert {papers.cert}"
    try:
        context.load_cert_chain(papers.cert, papers.key or None, _no_password)
    except _Encrypted:
        raise ClientCertError(f"{named} is encrypted: give one without a password") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"{named} is not the key of the certificate in {papers.cert}"
        else:
            why = f"--client-cert {papers.cert} can't be used: {tls_error_text(error)}"
        raise ClientCertError(why) from None


class _Encrypted(ValueError):
    """OpenSSL asked for a password."""


def _no_password() -> bytes:
    raise _Encrypted  # else OpenSSL would ask in the middle of what we draw


def _require(flag: str, file: str) -> None:
    """Raises ClientCertError: OpenSSL would not say which file it means."""
    try:
        Path(file).read_bytes()
    except OSError as error:
        raise ClientCertError(f"{flag} {file}: {error.strerror}") from None


def tls_trouble(url: str, said: str, papers: ClientCert) -> str:
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
