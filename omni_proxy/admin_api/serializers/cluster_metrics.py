"""Metrics of this proxy as a member of a cluster; no sample without [cluster].

A peer stands by its name in the configuration, without the part that is new with each start, so
that restarts make no new series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Metric

from omni_proxy.telemetry.prometheus import gauges, one, total


def cluster_metrics(status: Mapping[str, Any] | None) -> Iterator[Metric]:
    """`status`: as GET /status has it."""
    if status is None:
        return
    text = "1 while the store of the cluster is connected"
    yield one("cluster_store_connected", text, status["connected"])
    yield total("cluster_store_losses", "Connections to the store that broke", status["losses"])
    yield one("cluster_members", "Proxies of the cluster, this one included", status["members"])
    nodes = [(peer["member"].rpartition("/")[0], peer) for peer in status["peers"]]
    ages = [((node,), peer["age_secs"]) for node, peer in nodes]
    yield from gauges("cluster_peer_age_seconds", "Age of a peer's counts", ("peer",), ages)
    counts = [((node,), peer["in_flight"]) for node, peer in nodes]
    text = "Model requests in flight at a peer, as heard last"
    yield from gauges("cluster_peer_requests_in_flight", text, ("peer",), counts)
