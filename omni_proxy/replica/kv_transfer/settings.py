"""Settings of KV transfers, as parameters of a text stage, checked before anything starts.

Invariant: a `TransferSettings` holds values in range. Peers are addresses, not names: a name that a
request brings is resolved first, so that no name leads to an address that is not allowed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from omni_proxy.replica.kv_transfer.request_fields import (
    CONNECTORS,
    DEFAULT_BOOTSTRAP_PORT,
    ROLES,
    Connector,
    Role,
)

LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
ANY: Final = "any"
MAX_SECS: Final = 3600.0
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """`role` "null" is a replica that transfers nothing.

    A prefill replica listens on `host` and `port` (0: any free one), and tells decode to come to
    `advertise`, by default `host`. It keeps at most `max_bytes` for `lease_secs`. A leg waits
    `wait_secs` for any word of the other one, a transfer may take `transfer_secs`. A decode replica
    fetches from `peers` only: addresses, networks, or "any".
    """

    role: Role = "null"
    connector: Connector = "sglang"
    host: str = "127.0.0.1"
    port: int = DEFAULT_BOOTSTRAP_PORT
    advertise: str = ""
    lease_secs: float = 30.0
    wait_secs: float = 30.0
    transfer_secs: float = 30.0
    max_bytes: int = 2**30
    peers: tuple[str, ...] = LOOPBACK

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role is {', '.join(ROLES[1:])} or null, not {self.role!r}")
        if self.connector not in CONNECTORS:
            raise ValueError(f"connector is one of {', '.join(CONNECTORS)}, not {self.connector!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"the bootstrap port must be within 0 and 65535, not {self.port}")
        for name in ("lease_secs", "wait_secs", "transfer_secs"):
            if not 0 < getattr(self, name) <= MAX_SECS:
                raise ValueError(f"{name} must be above 0 and at most {MAX_SECS:g}")
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {self.max_bytes}")
        parse_peers(self.peers)

    @property
    def advertised(self) -> str:
        return self.advertise or self.host


def parse_peers(peers: tuple[str, ...]) -> tuple[Network, ...] | None:
    """The networks; None for any address. Raises ValueError."""
    if ANY in peers:
        return None
    try:
        return tuple(ipaddress.ip_network(peer, strict=False) for peer in peers)
    except ValueError as error:
        raise ValueError(f"peers are addresses, networks or {ANY!r}: {error}") from None


def is_allowed(address: str, networks: tuple[Network, ...] | None) -> bool:
    """Whether KVs may be fetched from this address."""
    if networks is None:
        return True
    given = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(given, "ipv4_mapped", None) or given
    return any(mapped in network for network in networks)


def parse_transfer_settings(params: Mapping[str, Any]) -> TransferSettings:
    """Raises ValueError for parameters that are unknown or out of range."""
    names = [field.name for field in fields(TransferSettings)]
    unknown = sorted(params.keys() - set(names))
    if unknown:
        raise ValueError(f"kv_transfer has no key {unknown[0]!r}; it has {', '.join(names)}")
    given = dict(params)
    if "peers" in given:
        given["peers"] = tuple(given["peers"])
    return TransferSettings(**given)
