"""Origins, hosts and ports: parsing, to refuse requests of pages of other origins.

Invariant: a text that can't be parsed equals no valid origin, and is no local name. Pure; used by
the proxy and by the replica.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

MAX_PORT: Final = 65535
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
Origin = tuple[str, str, int | None]  # scheme, host, port
NO_ORIGIN: Final[Origin] = ("", "", None)


def hostname_of(host: str) -> str:
    """The name in a Host field: lower case, without port, final dot and brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def is_local_name(name: str) -> bool:
    """Whether it is an IP address or localhost, which DNS rebinding can't redirect."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host, without brackets, is this machine's own: such traffic leaves no machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_origin(text: str) -> Origin:
    """The origin of an Origin, Referer or URL; NO_ORIGIN if it has none (`null`)."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        return NO_ORIGIN
    if not parts.hostname:
        return NO_ORIGIN
    return parts.scheme, parts.hostname, port or DEFAULT_PORTS.get(parts.scheme)
