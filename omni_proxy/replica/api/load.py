"""How busy the engine is, out of the gauges that its stages told. Pure.

Invariant: a gauge that no stage tells is 0, so that every reader finds every key. Counts are sums
over the stages, shares are the largest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Stats = Mapping[str, Mapping[str, float]]


def total(stats: Stats, name: str) -> float:
    return sum(values.get(name, 0.0) for values in stats.values())


def largest(stats: Stats, name: str) -> float:
    return max((values.get(name, 0.0) for values in stats.values()), default=0.0)


def load_of(stats: Stats, max_running: int) -> dict[str, Any]:
    """One rank's load under SGLang's names (routers.md 1.7)."""
    running = int(total(stats, "num_running_reqs"))
    waiting = int(total(stats, "num_waiting_reqs"))
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": int(total(stats, "num_waiting_uncached_tokens")),
        "num_total_reqs": running + waiting,
        "num_used_tokens": int(total(stats, "num_used_tokens")),
        "max_total_num_tokens": int(total(stats, "max_total_num_tokens")),
        "token_usage": largest(stats, "token_usage"),
        "gen_throughput": total(stats, "gen_throughput"),
        "cache_hit_rate": largest(stats, "cache_hit_rate"),
        "utilization": min(running / max_running, 1.0) if max_running else 0.0,
        "max_running_requests": max_running,
    }


def aggregate_of(load: Mapping[str, Any]) -> dict[str, Any]:
    """The sums and means over all ranks, of which there is one."""
    return {
        "total_running_reqs": load["num_running_reqs"],
        "total_waiting_reqs": load["num_waiting_reqs"],
        "total_reqs": load["num_total_reqs"],
        "avg_token_usage": load["token_usage"],
        "avg_throughput": load["gen_throughput"],
        "avg_utilization": load["utilization"],
    }
