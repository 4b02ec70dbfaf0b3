"""The records of the data plane in GET /status and the metrics, for JSON.

Pure: reads the services and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from omni_proxy.dataplane.accept.listeners import Listeners
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.services import ExchangeServices

MAX_CONNECTIONS = 100
# The counters of GET /status that are summed over data-plane processes.
COUNTERS: Final[Mapping[str, Callable[[ExchangeServices], int]]] = {
    "accepted": lambda services: services.totals.accepted,
    "failures": lambda services: services.loop.failures,
    "failed_tls_handshakes": lambda services: services.totals.failed_handshakes,
    "failed_proxy_headers": lambda services: services.totals.failed_proxy_headers,
    "answers_across_versions": lambda services: services.totals.across_versions,
}


def counters(services: ExchangeServices) -> dict[str, int]:
    return {name: read(services) for name, read in COUNTERS.items()}


def admission_record(services: ExchangeServices) -> dict[str, int]:
    inflight, queue = services.inflight, services.queue
    return {
        "inflight": inflight.in_flight,
        "max_inflight": services.settings.config.server.max_inflight,
        "peak_inflight": inflight.peak_in_flight,
        "rejected_total": inflight.rejected,
        "waiting": queue.waiting,
        "peak_waiting": queue.peak_waiting,
        "held_bytes": inflight.held_bytes,
    }


def totals_record(services: ExchangeServices) -> dict[str, object]:
    """The totals; cheap for any number of connections."""
    counts = counters(services)
    return {
        "connections": services.loop.connections,
        "ended": services.totals.ended_by_outcome(),
        **counts,
        "failed_proxy_introductions": counts["failed_proxy_headers"],  # old name, for one release
    }


def status_record(services: ExchangeServices, listeners: Listeners) -> dict[str, object]:
    tasks, policy = services.loop.tasks, services.balancer.policy
    oldest = sorted(tasks, key=lambda task: task.started_at)[:MAX_CONNECTIONS]
    return {
        "draining": services.inflight.draining,
        "tls": listeners.certificates.status(),
        **totals_record(services),
        "phases": dict(Counter(task.phase for task in tasks)),
        **admission_record(services),
        "voice_owner": services.balancer.voices.owner or None,
        "policy": {"name": policy.name, **policy.stats()},
        "pool_policies": services.balancer.pool_policies.stats(),
        "oldest_connections": [
            connection_record(task) for task in oldest if isinstance(task, Connection)
        ],
    }


def connection_record(connection: Connection) -> dict[str, object]:
    exchange = connection.exchange
    worker = exchange.worker if exchange is not None else None
    return {
        "peer": connection.peer,
        "phase": connection.phase,
        "age_secs": round(connection.loop.now - connection.started_at, 3),
        "target": exchange.target if exchange is not None else None,
        "worker": worker.url if worker is not None else None,
    }
