"""A client's place as text, `1.2.3.4:567` or `[::1]:567`, and the field that tells the front of it.

Contract: an IPv4 client of a socket that takes both kinds is shown as the IPv4 client that it is.
Written once for each connection, so that no request pays for it.
"""

from __future__ import annotations

from typing import Final

FIELD: Final = b"x-omni-peer"  # in a control request; the last one is ours
_MAPPED: Final = "::ffff:"


def place_of(host: str, port: int) -> str:
    """`host` as the kernel writes it."""
    address = host.removeprefix(_MAPPED)
    if ":" not in address:
        return f"{address}:{port}"
    return f"[{host}]:{port}"


def peer_field(place: str) -> bytes:
    """A field line that names the client; empty for one without an address (a Unix socket)."""
    return b"%b: %b\r\n" % (FIELD, place.encode("latin-1", "replace")) if place else b""


def host_of(place: str) -> str:
    """The address without its port."""
    return place.rpartition(":")[0].strip("[]")
