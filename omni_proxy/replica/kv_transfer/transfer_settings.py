"""Settings of KV transfers, as parameters of a text stage, and the `omni-proxy replica` options
for separate prefill and decode, which set them.

Invariant: a `TransferSettings` holds values in range; an invalid value is refused before a model is
loaded, with the option's name. Peers are addresses, not names: a host name in a request is resolved
first, and the resulting address must be allowed. Imports neither torch nor the web framework.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from omni_proxy.replica.kv_transfer.request_fields import (
    CONNECTORS,
    ROLES,
    Role,
)
from omni_proxy.replica.option_types import count, deadline, port_or_0
from omni_proxy.shared.engine_protocol import DEFAULT_BOOTSTRAP_PORT, KvConnector
from omni_proxy.shared.origins import MAX_PORT

LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
ANY: Final = "any"
MAX_SECS: Final = 3600.0
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """A replica's part in KV transfers; with `role` "null" it has none.

    A prefill replica listens on `host` and `port` (0: any free port), and advertises the address
    `advertise`, by default `host`. It keeps at most `max_bytes` of KVs, each for `lease_secs`. A
    leg waits `wait_secs` for any message of the other leg; a transfer may take `transfer_secs`. A
    decode replica fetches only from `peers`: addresses, networks, or "any".
    """

    role: Role = "null"
    connector: KvConnector = "sglang"
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
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"the bootstrap port must be within 0 and {MAX_PORT}, not {self.port}")
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
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    return any(mapped in network for network in networks)


def parse_transfer_settings(params: Mapping[str, Any]) -> TransferSettings:
    """Raises ValueError for parameters that are unknown or out of range."""
    names = [field.name for field in fields(TransferSettings)]
    unknown = sorted(params.keys() - set(names))
    if unknown:
        raise ValueError(f"kv_transfer has no key {unknown[0]!r}; it has {', '.join(names)}")
    values = dict(params)
    if "peers" in values:
        values["peers"] = tuple(values["peers"])
    return TransferSettings(**values)


def add_transfer_options(parser: argparse.ArgumentParser) -> None:
    """Options of a replica that does only the prefill, or only the decode."""
    group = parser.add_argument_group(
        "separate prefill and decode",
        "a prefill replica computes prompts and sends their KV caches to decode replicas, which a "
        "router pairs with it",
    )
    add = group.add_argument
    add(
        "--role",
        "--disaggregation-mode",
        choices=ROLES,
        default="null",
        help="the leg of a request that this replica serves; null: whole requests",
    )
    add(
        "--kv-connector",
        choices=CONNECTORS,
        help="format of the request fields that name a KV: sglang's bootstrap_room, or "
        "kv_transfer_params of vLLM's NIXL or Mooncake connector (default: sglang; nixl with "
        "--dialect vllm)",
    )
    add(
        "--bootstrap-port",
        "--disaggregation-bootstrap-port",
        type=port_or_0,
        default=DEFAULT_BOOTSTRAP_PORT,
        metavar="PORT",
        help="port on --host where a prefill replica serves KVs; 0: any free port",
    )
    add(
        "--kv-host",
        metavar="HOST",
        help="address advertised to decode for fetching KVs (default: --host)",
    )
    add(
        "--kv-peers",
        metavar="NETWORKS",
        default=",".join(LOOPBACK),
        help="addresses and networks that a decode replica may fetch from, separated by commas; "
        "any: all of them",
    )
    for name, default, what in (
        ("lease", 30.0, "how long a KV is kept for decode"),
        ("wait", 30.0, "how long a leg waits for a message of the other leg"),
        ("transfer", 30.0, "how long one transfer may take"),
    ):
        add(f"--kv-{name}-secs", type=deadline, default=default, metavar="SECS", help=what)
    add(
        "--kv-max-bytes",
        type=count,
        default=2**30,
        metavar="BYTES",
        help="limit on the memory for KVs that wait to be fetched or to be used",
    )


def transfer_params(arguments: argparse.Namespace) -> dict[str, Any]:
    """The role of the replica, as a parameter of a text stage; nothing without a role."""
    if arguments.role == "null":
        return {}
    advertise = (arguments.kv_host or "").removeprefix("[").removesuffix("]")
    settings = {
        "role": arguments.role,
        "connector": connector_of(arguments),
        "host": arguments.host,
        "port": arguments.bootstrap_port,
        "advertise": advertise,
        "lease_secs": arguments.kv_lease_secs,
        "wait_secs": arguments.kv_wait_secs,
        "transfer_secs": arguments.kv_transfer_secs,
        "max_bytes": arguments.kv_max_bytes,
        "peers": [peer for peer in arguments.kv_peers.split(",") if peer],
    }
    return {"kv_transfer": settings}


def connector_of(arguments: argparse.Namespace) -> KvConnector:
    default: KvConnector = "nixl" if arguments.dialect == "vllm" else "sglang"
    return arguments.kv_connector or default


def transfer_problem(arguments: argparse.Namespace) -> str:
    """Why these arguments are invalid for a prefill or decode replica; "" if they are valid."""
    if arguments.role == "null":
        return ""
    if arguments.engine != "torch":
        return f"--role {arguments.role} needs --engine torch"
    if arguments.tp > 1:
        return f"--role {arguments.role}: KV transfer works with one rank only; remove --tp"
    connector = connector_of(arguments)
    if connector == "sglang" and arguments.dialect == "vllm":
        return "--kv-connector sglang: --dialect vllm serves none of SGLang's routes"
    wildcard = arguments.host in ("0.0.0.0", "::")
    if connector == "nixl" and arguments.role == "prefill" and wildcard and not arguments.kv_host:
        return f"--host {arguments.host}: set the address that decode connects to with --kv-host"
    try:
        parse_transfer_settings(transfer_params(arguments)["kv_transfer"])
    except ValueError as error:
        return f"--role {arguments.role}: {error}"
    return ""
