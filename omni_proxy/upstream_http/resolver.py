"""Host names to addresses, none of which leads to a machine's metadata service.

Invariant: what comes out is a literal address that `refused_address` lets pass; one bad address
among several refuses the name as a whole. Nothing is kept: a name is asked for anew each time.
"""

from __future__ import annotations

import ipaddress

import trio

from omni_proxy.config.url import refused_address

Address = tuple[str, int]


class RefusedAddress(Exception):
    """The name leads where no worker may be."""


async def resolve(host: str, port: int) -> Address:
    """The first address of `host`. Raises RefusedAddress, or OSError when there is none."""
    return (await addresses(host, port))[0]


async def addresses(host: str, port: int) -> tuple[Address, ...]:
    """Every address of `host` in the system's order; a literal address is its own.

    Raises RefusedAddress, or OSError when there is none.
    """
    if _is_literal(host):
        found = [host]
    else:
        try:
            answers = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        except UnicodeError as error:  # a label that IDNA can't write
            raise OSError(f"{host} is no host name: {error}") from None
        found = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    for ip in found:
        reason = refused_address(ip)
        if reason:
            raise RefusedAddress(f"{host}: {reason}")
    return tuple((ip, port) for ip in found)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
