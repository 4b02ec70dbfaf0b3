"""TLS contexts of clients: their options, and the authorities of the system.

Invariant: TLS 1.2 is the oldest version, HTTP/1.1 is the only protocol offered, and a connection
that is cut off is an error. Used by the proxy and by the replica.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from typing import Final

PROTOCOLS: Final = ["http/1.1"]


def with_common_options(context: ssl.SSLContext) -> ssl.SSLContext:
    """Also for contexts of listeners."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Python before 3.11.4 treats a truncated connection as a regular end.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    context.set_alpn_protocols(PROTOCOLS)
    return context


def context_without_authorities() -> ssl.SSLContext:
    return with_common_options(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # verifies chain and name


def context_of_the_system() -> ssl.SSLContext:
    """A context that no other connection shares, which trusts the system's authorities."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile or (paths.capath and os.listdir(paths.capath)):
        context = context_without_authorities()
        context.set_default_verify_paths()
        return context
    # A minimal container, or a binary built on another system: use the authorities of httpx.
    import httpx

    return with_common_options(httpx.create_ssl_context(trust_env=False))


@cache
def system_context() -> ssl.SSLContext:
    """Created once, because loading the system's bundle is slow."""
    return context_of_the_system()
