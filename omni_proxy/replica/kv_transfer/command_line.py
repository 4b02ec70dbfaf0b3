"""The options of `omni-proxy replica` for prefill and decode apart, and what is made of them.

Invariant: what is refused is refused before a model is loaded, by the option's name. Imports
neither torch nor the web framework.
"""

from __future__ import annotations

import argparse
from typing import Any

from omni_proxy.replica.kv_transfer.request_fields import (
    CONNECTORS,
    DEFAULT_BOOTSTRAP_PORT,
    ROLES,
    Connector,
)
from omni_proxy.replica.kv_transfer.settings import LOOPBACK, parse_transfer_settings
from omni_proxy.replica.option_types import count, deadline, port_or_0


def add_transfer_options(parser: argparse.ArgumentParser) -> None:
    """Options of a replica that does only the prefill, or only the decode."""
    group = parser.add_argument_group(
        "prefill and decode apart",
        "a prefill replica computes prompts and hands their KV caches over to decode replicas, "
        "which a router pairs with it",
    )
    add = group.add_argument
    add(
        "--role",
        "--disaggregation-mode",
        choices=ROLES,
        default="null",
        help="what it does of a request; null: all of it",
    )
    add(
        "--kv-connector",
        choices=CONNECTORS,
        help="whose fields in requests name a KV: sglang's bootstrap_room, or kv_transfer_params "
        "as vLLM's NIXL or Mooncake connector (default: sglang, with --dialect vllm nixl)",
    )
    add(
        "--bootstrap-port",
        "--disaggregation-bootstrap-port",
        type=port_or_0,
        default=DEFAULT_BOOTSTRAP_PORT,
        metavar="PORT",
        help="where a prefill replica hands KVs over, on --host; 0: any free port",
    )
    add("--kv-host", metavar="HOST", help="where decode is told to fetch KVs, if not --host")
    add(
        "--kv-peers",
        metavar="NETWORKS",
        default=",".join(LOOPBACK),
        help="addresses that a decode replica fetches from, with commas; any: all of them",
    )
    for name, default, what in (
        ("lease", 30.0, "how long a KV is kept for decode"),
        ("wait", 30.0, "how long either leg waits for a word of the other"),
        ("transfer", 30.0, "the longest that one transfer may take"),
    ):
        add(f"--kv-{name}-secs", type=deadline, default=default, metavar="SECS", help=what)
    add(
        "--kv-max-bytes",
        type=count,
        default=2**30,
        metavar="BYTES",
        help="most memory for KVs that wait to be fetched, or to be used",
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


def connector_of(arguments: argparse.Namespace) -> Connector:
    default: Connector = "nixl" if arguments.dialect == "vllm" else "sglang"
    return arguments.kv_connector or default


def transfer_problem(arguments: argparse.Namespace) -> str:
    """Why these arguments do not make a prefill or decode replica; "" if they do."""
    if arguments.role == "null":
        return ""
    if arguments.engine != "torch":
        return f"--role {arguments.role} needs --engine torch"
    if arguments.tp > 1:
        return f"--role {arguments.role}: a KV is handed over by one rank; leave --tp out"
    connector = connector_of(arguments)
    if connector == "sglang" and arguments.dialect == "vllm":
        return "--kv-connector sglang: --dialect vllm serves none of SGLang's routes"
    wildcard = arguments.host in ("0.0.0.0", "::")
    if connector == "nixl" and arguments.role == "prefill" and wildcard and not arguments.kv_host:
        return f"--host {arguments.host}: name the address that decode reaches by --kv-host"
    try:
        parse_transfer_settings(transfer_params(arguments)["kv_transfer"])
    except ValueError as error:
        return f"--role {arguments.role}: {error}"
    return ""
