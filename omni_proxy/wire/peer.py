"""A client's place as text: `1.2.3.4:567` or `[::1]:567`.

Contract: an IPv4 client of a socket that takes both kinds is shown as the IPv4 client that it is.
Written once for each connection, so that no request pays for it.
"""

from __future__ import annotations

from typing import Final

_MAPPED: Final = "::ffff:"


def place_of(host: str, port: int) -> str:
    """`host` as the kernel writes it."""
    address = host.removeprefix(_MAPPED)
    if ":" not in address:
        return f"{address}:{port}"
    return f"[{host}]:{port}"
