"""Resolves host names to addresses, and refuses addresses of cloud metadata services.

Invariant: the result is a literal address that `refused_address` accepts; one refused address among
several refuses the whole name. Results are not cached.

`reject_own_addresses` finds workers whose address this proxy listens on: their requests would loop.
Invariant: a name that can't be resolved in time is no error here. The hop header ends loops that
addresses don't reveal (a forwarded port, another proxy), see `wire.forwarded`. It blocks, so call
it in a thread.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

import trio

from omni_proxy.config.parse import ConfigError, Problem
from omni_proxy.config.schema import Config
from omni_proxy.config.url import dial_address, refused_address

Address = tuple[str, int]


class RefusedAddress(Exception):
    """The name resolves to an address that workers must not have."""


async def resolve(host: str, port: int) -> Address:
    """The first address of `host`. Raises RefusedAddress, or OSError if it has none."""
    return (await addresses(host, port))[0]


async def addresses(host: str, port: int) -> tuple[Address, ...]:
    """Every address of `host` in the system's order; a literal address is returned as it is.

    Raises RefusedAddress, or OSError if it has none.
    """
    if _is_literal(host):
        resolved_hosts = [host]
    else:
        try:
            answers = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        except UnicodeError as error:  # a label that IDNA can't encode
            raise OSError(f"{host} is no host name: {error}") from None
        resolved_hosts = list(dict.fromkeys(str(info[4][0]) for info in answers))
    for ip in resolved_hosts:
        reason = refused_address(ip)
        if reason:
            raise RefusedAddress(f"{host}: {reason}")
    return tuple((ip, port) for ip in resolved_hosts)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


RESOLVE_SECS: Final = 2.0  # for all names together
REASON: Final = "is an address of this proxy itself: its requests would loop"

_Ip = IPv4Address | IPv6Address


def is_own_address(address: Address, listeners: Iterable[Address]) -> bool:
    """Whether a connection to `address` reaches one of the listeners. All addresses are literal."""
    ip = _ip(address[0])
    return ip is not None and any(
        address[1] == port and _reaches(ip, at) for host, port in listeners if (at := _ip(host))
    )


def _ip(text: str) -> _Ip | None:
    try:
        resolved_hosts = ip_address(text)
    except ValueError:
        return None
    return getattr(resolved_hosts, "ipv4_mapped", None) or resolved_hosts


def _reaches(ip: _Ip, listener: _Ip) -> bool:
    if ip.is_unspecified:  # dialling it reaches loopback
        return listener.is_unspecified or listener.is_loopback
    if not listener.is_unspecified:
        return ip == listener
    # The unspecified IPv6 address includes IPv4.
    return (listener.version == 6 or ip.version == 4) and (ip.is_loopback or _of_this_machine(ip))


def _of_this_machine(ip: _Ip) -> bool:
    """Whether the address belongs to an interface of this machine: only those can be bound."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError:
        return False
    return True


def parse_listeners(addresses: Iterable[str]) -> list[Address]:
    """Parse `host:port` addresses of listeners; Unix sockets are skipped."""
    resolved_hosts = []
    for address in addresses:
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if port.isdecimal():
            resolved_hosts.append((host.strip("[]"), int(port)))
    return resolved_hosts


def reject_own_addresses(config: Config, flag_urls: Sequence[str], file: str) -> None:
    """Raises ConfigError for workers in `file` or on the command line whose URL leads to this
    proxy. Blocks for at most RESOLVE_SECS."""
    listeners = _configured(config)
    ports = {port for _, port in listeners}
    urls = [(f"workers[{i}].url", entry.url) for i, entry in enumerate(config.workers)]
    urls += [("--worker-urls", url) for url in flag_urls]
    dialled = [(key, url, dial_address(url)) for key, url in urls]
    # A host is resolved only if its port is one of this proxy's.
    near = [
        (key, url, at) for key, url, at in dialled if not isinstance(at, str) and at[1] in ports
    ]
    if not near:
        return
    resolved = _resolved({host for host, _ in (*listeners, *(at for _, _, at in near))})
    own_addresses = [(ip, port) for host, port in listeners for ip in resolved.get(host, ())]
    problems = [
        Problem(key, None, f'"{url}" {REASON}', file="command line" if key[0] == "-" else file)
        for key, url, (host, port) in near
        if any(is_own_address((ip, port), own_addresses) for ip in resolved.get(host, ()))
    ]
    if problems:
        raise ConfigError(problems, file)


def _configured(config: Config) -> list[Address]:
    """The configured listeners with a fixed port; port 0 is chosen only at the start."""
    server, admin = config.server, config.admin
    listeners = [] if server.host.startswith("unix:") else [(server.host, server.port)]
    if admin.listen and not admin.listen.startswith("unix:"):
        listeners += parse_listeners([admin.listen])
    return [(host or "0.0.0.0", port) for host, port in listeners if port]


def _resolved(hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The addresses of each host that resolves within RESOLVE_SECS, all hosts together."""
    resolved_hosts: dict[str, tuple[str, ...]] = {}

    def look_up(host: str) -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        resolved_hosts[host] = tuple(dict.fromkeys(str(info[4][0]) for info in answers))

    threads = []
    for host in hosts:
        if _ip(host) is not None:
            resolved_hosts[host] = (host,)
            continue
        threads.append(threading.Thread(target=look_up, args=(host,), daemon=True))
        threads[-1].start()
    until = time.monotonic() + RESOLVE_SECS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(resolved_hosts)
