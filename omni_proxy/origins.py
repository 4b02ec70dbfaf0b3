"""Origins and hosts: the comparisons that keep pages of other origins out.

Invariant: what can't be parsed equals nothing, and is no name of our own. Pure; the proxy and the
replica judge by the same text.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
Origin = tuple[str, str, int | None]  # scheme, host, port
NO_ORIGIN: Final[Origin] = ("", "", None)


def hostname_of(host: str) -> str:
    """Of a Host field: without its port and a closing dot, in lower case, no brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def is_local_name(name: str) -> bool:
    """Whether it is an address or localhost, which lead where they say."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def parse_origin(text: str) -> Origin:
    """Of an Origin, Referer or URL; NO_ORIGIN for what has none (`null`)."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        return NO_ORIGIN
    if not parts.hostname:
        return NO_ORIGIN
    return parts.scheme, parts.hostname, port or _DEFAULT_PORTS.get(parts.scheme)
