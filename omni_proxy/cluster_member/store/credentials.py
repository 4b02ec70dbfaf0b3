"""Where the store is, and with which password: read anew for each connection.

Invariant: no error holds the password, and neither does the URL that is shown. Blocking.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from omni_proxy.config.schema import Config
from omni_proxy.config.tables.cluster import StoreAddress, hide_password, store_address
from omni_proxy.system.tls_contexts import PemError, client_context, tls_error_text


class CredentialError(Exception):
    """The store's URL or password can't be read."""


def read_address(config: Config) -> StoreAddress:
    """Raises CredentialError."""
    table = config.cluster
    url = table.url
    if table.url_env:
        url = os.environ.get(table.url_env, "")
        if not url:
            raise CredentialError(f"the variable {table.url_env} (cluster.url_env) is not set")
    try:
        address = store_address(url)
    except ValueError as error:
        source = f"the variable {table.url_env}" if table.url_env else "cluster.url"
        raise CredentialError(f"{source} {error.args[0]}") from None
    if not table.password_file:
        return address
    try:
        password = Path(table.password_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        name = table.password_file
        raise CredentialError(f"cluster.password_file {name} can't be read: {reason}") from None
    return address._replace(password=password)


def tls_context(address: StoreAddress, config: Config) -> ssl.SSLContext | None:
    """None for a connection without TLS. Raises CredentialError."""
    if not address.tls:
        return None
    try:
        return client_context(config.server.tls_worker_ca, verify=True)
    except PemError as error:
        raise CredentialError(str(error)) from None
    except OSError as error:
        raise CredentialError(tls_error_text(error)) from None


def shown_url(config: Config) -> str:
    """For the status and the log."""
    table = config.cluster
    return hide_password(table.url) or f"(from {table.url_env})"
