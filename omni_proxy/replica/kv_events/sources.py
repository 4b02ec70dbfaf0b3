"""Where a replica's KV events are published, as vLLM and SGLang report it.

Contract: real-engines.md 4 (`/kv_event_sources`), features.md 7 (`kv_events` of `/server_info`).
Invariant: what is reported is what was opened: a port 0 of the settings is the port that was taken,
`*` is this replica's address, which the caller knows. PURE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from omni_proxy.replica.kv_events.settings import KvEventSettings, binds, tcp_parts

INFO_KEY: Final = "kv_events"  # in the information of a stage


def stage_information(
    settings: KvEventSettings, endpoint: str, replay_endpoint: str
) -> dict[str, Any]:
    """What a stage reports of its publisher, with the endpoints that were opened."""
    opened = {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
    return {INFO_KEY: msgspec.structs.asdict(settings) | opened}


def vllm_sources(stages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """By rank; empty where nothing is published."""
    return {
        str(rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": info["endpoint"],
            "replay_endpoint": info["replay_endpoint"] or None,
            "buffer_steps": info["buffer_steps"],
            "hwm": info["hwm"],
            "max_queue_size": info["max_queue_size"],
            "topic": info["topic"],
        }
        for rank, info in enumerate(_publishers(stages))
    }


def sglang_source(stages: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """None where nothing is published, or not on a port of this replica."""
    for info in _publishers(stages):
        host, port = tcp_parts(info["endpoint"])
        if host and binds(info["endpoint"]):
            return {
                "publisher": "zmq",
                "endpoint_host": host,
                "endpoint_port_base": port,
                "block_size": info["block_size"],
                "dp_size": 1,
                "topic": info["topic"],
                "replay_endpoint": info["replay_endpoint"] or None,
            }
    return None


def _publishers(stages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [stage[INFO_KEY] for stage in stages if INFO_KEY in stage]
