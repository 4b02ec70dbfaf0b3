"""The state of the proxy as one JSON value, the data of each event of the feed.

Invariant: it is computed at most twice a second for all readers together, and never waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import trio

from omni_proxy import __version__
from omni_proxy.admin_api.serializers.discovery_report import discovery_rows
from omni_proxy.admin_api.serializers.key_records import key_records, key_refusals
from omni_proxy.admin_api.serializers.readiness import Readiness
from omni_proxy.admin_api.serializers.slow_workers import slow_workers
from omni_proxy.admin_api.serializers.weight_status import pause_record, weight_status
from omni_proxy.admin_api.serializers.worker_records import (
    Why,
    disabled_by_record,
    engine_load_record,
    operator_state,
    reasons,
)
from omni_proxy.admin_api.services import Services
from omni_proxy.config.state import DisabledBy
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker, shown_adapters
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from omni_proxy.telemetry.recent_window import FinishedExchange, Point, RequestSteps
from omni_proxy.wire.errors import to_json

FRESH_SECS = 0.5
_NO_READER: Final[Mapping[str, object]] = {}


class Snapshots:
    def __init__(self, services: Services, readiness: Readiness) -> None:
        self._services = services
        self._readiness = readiness
        self._made_at = float("-inf")
        self._made = b""

    def now(self, reader: Mapping[str, object] = _NO_READER) -> bytes:
        """One JSON object, computed now, with the whole history."""
        self._made_at = float("-inf")
        return self.with_history(0, reader)[0]

    def with_history(
        self, after: int, reader: Mapping[str, object] = _NO_READER
    ) -> tuple[bytes, int]:
        """One JSON object with the points after second `after` (Unix time), and the time of the
        newest point.

        `reader`: keys for this reader only.
        """
        points = list(self._services.telemetry.instruments.recent.since(after))
        own = {**reader, "history": [_point(point) for point in points]}
        head = to_json(own)[:-1] + b","
        return head + self._whole()[1:], points[-1].at if points else after

    def _whole(self) -> bytes:
        now = trio.current_time()
        if now - self._made_at >= FRESH_SECS:
            self._made, self._made_at = to_json(self._now()), now
        return self._made

    def _now(self) -> dict[str, object]:
        services, config_store = self._services, self._services.config_store
        plane, instruments = services.data_plane, services.telemetry.instruments
        workers, keys, process = services.workers, services.keys, services.process
        reason = self._readiness.reason()
        state = operator_state(services.weight_operations.journal, config_store)
        reason_of = reasons(workers, state)
        launch = workers.launcher.status() if workers.launcher else []
        launches = {row["url"]: row for row in launch}
        server = config_store.config.server
        loop_lag_ms = round(instruments.ticker.worst_secs * 1000, 2)
        counts = {**plane.counts(), "loop_lag_ms": loop_lag_ms}
        now = time.time()
        rows = [
            {
                **self._row(worker, now, reason_of),
                "launch": launches.get(worker.url),
                "disabled_by": disabled_by_record(worker, state.disabled_by),
                "paused": pause_record(state.pauses.get(worker.url)),
            }
            for worker in workers.fleet.workers
        ]
        return {
            "at": _iso(now),
            "version": __version__,
            "pid": os.getpid(),
            "started_at": process.started_at.isoformat(),
            "uptime_secs": round(time.monotonic() - process.started, 3),
            "revision": config_store.revision,
            "keys": key_records(keys, config_store.config),
            **key_refusals(keys),
            # With [admin] listen the feed is read there, where no model routes are served.
            "models_at": plane.served_at()[0] if config_store.config.admin.listen else None,
            "key_required": bool(server.api_key or config_store.config.keys),
            "ready": not reason,
            "reason": reason or None,
            "leaving": plane.draining or process.leaving(),
            "metrics": server.metrics,
            "usage_metrics": server.metrics and server.usage_metrics,
            "config_file": str(config_store.file) if config_store.file else None,
            "admission": plane.admission(),
            "data_plane": counts,
            "door": counts,  # the old name
            "policy": {"name": plane.policy.name, **plane.policy.stats()},
            "fleet": _with_slowness(rows, now),
            "last_minute": dict(
                zip(("requests", "errors"), instruments.recent.last_minute(), strict=True)
            ),
            "recent_ends": _ends(instruments.recent.ends(), now - time.monotonic()),
            "last_reload": config_store.last_reload,
            "launch": launch,
            "supervisors": process.supervisors(),
            "watchdog": plane.watchdog(),
            "weights": weight_status(services.weight_operations),
            "discovery": discovery_rows(workers.discovery),
            "cluster": services.cluster.status() if services.cluster else None,
        }

    def _row(self, worker: Worker, now: float, reason_of: Why) -> dict[str, object]:
        machine, instruments = worker.health, self._services.telemetry.instruments
        disabled_by = self._services.config_store.state.disabled_by.get(worker.url)
        state_since = _state_since(worker, self._services.workers.drains, disabled_by)
        if state_since is None and (holds := instruments.holds.of(worker)):
            state_since = _iso(min(holds.values()))
        counted = self._services.config_store.config.server.metrics
        return {
            "id": worker.id,
            "url": worker.url,
            "display_id": worker.display_id,
            "model": worker.model,
            "adapters": shown_adapters(worker),
            "role": worker.role,
            "health": machine.state.value,
            "routable": worker.routable,
            "disabled": worker.disabled,
            "half_open": machine.is_half_open,
            "trial": machine.is_half_open,  # the old name of half_open, for one release
            "held_by": sorted(worker.cordon_reasons),
            "held_since": {
                name: _iso(since) for name, since in instruments.holds.of(worker).items()
            },
            "why": reason_of(worker),
            "overloaded": self._services.workers.fleet.loads.reason(worker) or None,
            "since": machine.since.isoformat(),
            "state_since": state_since,
            "last_error": machine.last_error,
            "in_flight": worker.in_flight,
            "max_inflight": worker.max_inflight,
            "sessions": self._services.data_plane.session_count(worker),
            "kv_mode": worker.kv_mode,
            "kv_reason": worker.kv_reason,
            "ranks_in_flight": [rank.in_flight for rank in worker.dp_ranks],
            **instruments.recent.worker_window(worker, now)._asdict(),
            "minute": instruments.history.minute_of(worker, now),
            "elsewhere": self._peer_figures(worker),
            "engine_load": engine_load_record(self._services.workers.fleet.loads, worker),
            "silent_secs": instruments.stall_detector.silent_secs(worker, now) if counted else None,
            "routed": sum(worker.routed.values()),
            "failed": sum(worker.failed.values()),
            "weight_version": worker.weight_label,
            "weight_epoch": worker.weight_epoch,
            "origin": worker.origin,
            "weight": worker.weight,
            "drain": self._services.workers.drains.get_record(worker),
        }

    def _peer_figures(self, worker: Worker) -> dict[str, object] | None:
        """The worker's figures at the other proxies of the cluster; None without any."""
        cluster = self._services.cluster
        figures = cluster.peer_figures(worker) if cluster is not None else None
        if figures is None:
            return None
        return {"in_flight": worker.peer_in_flight, **figures._asdict()}


def _with_slowness(rows: list[dict[str, object]], at: float) -> list[dict[str, object]]:
    slow = slow_workers(rows, at)
    for row in rows:
        slowness = slow.get(str(row["id"]))
        row["slow"] = slowness._asdict() if slowness is not None else None
    return rows


def _state_since(
    worker: Worker, drains: WorkerDrains, disabled_by: DisabledBy | None
) -> str | None:
    """The time since which the worker has its most important state; None if unknown.

    The time at which HTTP disabled it is kept across restarts. A pause has its own time.
    """
    machine = worker.health
    if machine.state in (Health.DEAD, Health.UNHEALTHY):
        since: datetime | None = machine.since
    elif worker.disabled:
        since = drains.state_since(worker) or _disabled_at(worker, disabled_by)
    else:
        since = None if worker.cordon_reasons else machine.since
    return since.isoformat() if since else None


def _disabled_at(worker: Worker, disabled_by: DisabledBy | None) -> datetime:
    try:
        return datetime.fromisoformat(disabled_by.at if disabled_by is not None else "")
    except ValueError:  # a person may have edited the state file
        return worker.disabled_changed_at


def _point(point: Point) -> dict[str, object]:
    return point._asdict()


def _ends(ends: list[FinishedExchange], offset: float) -> list[dict[str, object]]:
    """`offset`: Unix time minus the event loop's clock."""
    return [
        {
            **{name: value for name, value in _steps_of(end.steps).items() if value},
            "at": _iso(end.at + offset),
            "route": end.route,
            "model": end.model,
            "target_model": end.target_model,
            "worker": end.worker or None,
            "prefill": end.steps.prefill or None,
            "status": end.status,
            "end": end.end,
            "ended_by": end.ended_by,
            "phase": end.phase,
            "error": end.error,
            "attempts": end.attempts,
            "first_ms": None if end.first_secs is None else round(end.first_secs * 1000, 1),
            "total_ms": round(end.total_secs * 1000, 1),
            "request_id": end.request_id,
        }
        for end in ends
    ]


def _steps_of(steps: RequestSteps) -> dict[str, object]:
    """The steps of a request; None or a similar false value if unknown."""
    return {
        "tried": [{"worker": worker, "outcome": outcome} for worker, outcome in steps.tried],
        "queue_ms": _ms(steps.queued_secs),
        "sent_ms": _ms(steps.sent_secs),
        "head_ms": _ms(steps.head_secs),
        "longest_gap_ms": _ms(steps.longest_gap),
        "prefill_ms": _ms(steps.prefill_secs),
        "fallback": steps.fallback,
        "policy": steps.policy,
        "key": steps.caller,
        "client": steps.client,
        "trace_id": steps.trace_id,
        "stream": steps.stream,
        "bytes_in": steps.bytes_in,
        "bytes_out": steps.bytes_out,
        "chunks": steps.chunks,
        "rank": steps.rank,
        "weight_version": steps.weight_version,
        "has_candidates": steps.candidates is not None,  # GET /explain has them
    }


def _ms(secs: float | None) -> float | None:
    return round(secs * 1000, 1) if secs else None


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
