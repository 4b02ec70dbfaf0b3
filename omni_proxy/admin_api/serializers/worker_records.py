"""The JSON records of workers: the keys of the API and those of sgl-model-gateway.

`worker_record` has the fleet's data; `WorkerRecords` adds why a worker is out of rotation, its
pause, its drain, its note, and who paused or disabled it. Must not change anything. Invariant:
without the admin key a client gets no names of callers.

Contract of `why`: None exactly while the worker is routable; otherwise one sentence about the cause
that an operator has to fix first, with the command that does so if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace
from quart import has_request_context

from omni_proxy.admin_api.serializers.discovery_report import discovered_record
from omni_proxy.admin_api.serializers.readiness import HOW_TO_CONTINUE
from omni_proxy.admin_api.serializers.weight_status import pause_record
from omni_proxy.admin_api.services import DataPlaneView, WorkerServices
from omni_proxy.admin_api.worker_requests import WorkerNotes
from omni_proxy.config.state import DisabledBy
from omni_proxy.fleet.cordon_reasons import LAUNCH_CORDON, PAUSED, UNCERTAIN
from omni_proxy.fleet.engine_load import EngineLoads
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import Worker, capability_names, shown_adapters
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.weight_sync.protocol.journal import PauseRecord
from omni_proxy.weight_sync.state_journal import StateJournal

RESOLVE = "`omni-proxy weights resolve` brings it back once its weights are verified"
Why = Callable[[Worker], str | None]
UNUSED_CACHE_TOKENS = 4096  # predicted tokens after which a report of 0 gets a note


class OperatorState(NamedTuple):
    """By worker URL. `uncertain`: why the worker's weights are not known."""

    uncertain: Mapping[str, str]
    pauses: Mapping[str, PauseRecord]
    disabled_by: Mapping[str, DisabledBy]


def operator_state(journal: StateJournal, config_store: ConfigStore) -> OperatorState:
    return OperatorState(journal.uncertain, journal.pauses(), config_store.state.disabled_by)


def visible_operator_state(
    journal: StateJournal, config_store: ConfigStore, presents_key: Callable[[], bool]
) -> OperatorState:
    """With the names of callers only if the current request may see them."""
    state = operator_state(journal, config_store)
    if not (state.pauses or state.disabled_by) or (has_request_context() and presents_key()):
        return state
    return state._replace(
        pauses={url: replace(pause, by="") for url, pause in state.pauses.items()},
        disabled_by={url: DisabledBy(at=record.at) for url, record in state.disabled_by.items()},
    )


def reasons(workers: WorkerServices, state: OperatorState) -> Why:
    """A function that returns the reason of a worker, from the current state."""
    launch = workers.launcher.status() if workers.launcher else []
    launches = {str(launch_row["url"]): launch_row for launch_row in launch}

    def why(worker: Worker) -> str | None:
        if worker.routable:
            return None
        launch_row = launches.get(worker.url)
        return (
            _declared_dead(worker)
            or _disabled(worker, workers.drains.secs_left, state.disabled_by)
            or (
                launch_row is not None
                and LAUNCH_CORDON in worker.cordon_reasons
                and _launching(launch_row)
            )
            or workers.discovery.reason(worker)
            or _unhealthy(worker)
            or _cordoned(worker, state.uncertain, state.pauses)
            or "half-open: one request at a time until one succeeds"
        )

    return why


def _declared_dead(worker: Worker) -> str:
    return "dead: declared so by an operator" if worker.health.declared_dead else ""


def _disabled(
    worker: Worker,
    secs_left: Callable[[Worker], float | None],
    disabled_by: Mapping[str, DisabledBy],
) -> str:
    state = worker.health.state
    if not worker.disabled or state in (Health.DEAD, Health.UNHEALTHY):
        return ""
    if not worker.in_flight:
        record = disabled_by.get(worker.url)
        return f"disabled by {record.by if record and record.by else 'an operator'}"
    secs = secs_left(worker)
    until = f", {secs:.0f} s left" if secs else ""
    return f"draining: {worker.in_flight} in flight{until}"


def _launching(launch_row: Mapping[str, object]) -> str:
    """The state of the launched process. A probe would not do: another process may answer it."""
    state = str(launch_row["state"]).replace("_", " ")
    error = launch_row["last_error"]
    return f"its process is {state}: {error}" if error else f"its process is {state}"


def _unhealthy(worker: Worker) -> str:
    health = worker.health
    if health.state in (Health.DEAD, Health.UNHEALTHY):
        return f"{health.state.value}: {health.last_error or 'no reason known'}"
    if health.state is not Health.UNKNOWN:
        return ""
    if health.last_error:
        return f"not up yet: {health.last_error}"
    return "waiting for good probes" if health.last_checked_at else "waiting for its first probe"


def _cordoned(
    worker: Worker, uncertain: Mapping[str, str], pauses: Mapping[str, PauseRecord]
) -> str:
    if UNCERTAIN in worker.cordon_reasons and worker.url in uncertain:
        return f"uncertain: {uncertain[worker.url]}; {RESOLVE}"
    if PAUSED in worker.cordon_reasons and worker.url in pauses:
        return f"{pauses[worker.url].describe()}; {HOW_TO_CONTINUE}"
    return f"held: {', '.join(sorted(worker.cordon_reasons))}" if worker.cordon_reasons else ""


GATEWAY_STATUS = {
    Health.UNKNOWN: "pending",
    Health.HEALTHY: "ready",
    Health.UNHEALTHY: "not_ready",
    Health.DEAD: "failed",
}


def rank_record(rank: Worker, index: int) -> dict[str, object]:
    """The values of a data-parallel rank that differ from its worker's."""
    return {
        "rank": index,
        "in_flight": rank.in_flight,
        "peak_in_flight": rank.peak_in_flight,
        "max_inflight": rank.max_inflight,
        "routed_requests": sum(rank.routed.values()),
        "successful_requests": sum(rank.succeeded.values()),
        "failed_requests": sum(rank.failed.values()),
    }


def prefix_cache_record(counts: tuple[int, int] | None) -> dict[str, object] | None:
    """Prompt tokens that were predicted to be cached, and those that the worker reported as cached;
    None if it reports none."""
    if counts is None:
        return None
    predicted, reported = counts
    unused = not reported and predicted >= UNUSED_CACHE_TOKENS
    return {
        "predicted_tokens": predicted,
        "reported_tokens": reported,
        "note": "it always reports 0 cached tokens: is its prefix cache on?" if unused else None,
    }


def disabled_by_record(
    worker: Worker, records: Mapping[str, DisabledBy]
) -> dict[str, str | None] | None:
    """The caller that disabled or drained the worker, and the time; None if it is enabled, or
    disabled by the file."""
    record = records.get(worker.url) if worker.disabled else None
    return {"by": record.by or None, "at": record.at or None} if record is not None else None


def worker_record(worker: Worker) -> dict[str, object]:
    """The record of note:omni-router 3, then the proxy's own keys."""
    health = worker.health
    checked = health.last_checked_at
    return {
        "worker_id": worker.id,
        "id": worker.id,
        "display_id": worker.display_id,
        "url": worker.url,
        "model": worker.model,
        "adapters": shown_adapters(worker),
        "capabilities": capability_names(worker.mask),
        "active_requests": worker.in_flight,
        "health_state": health.state.value,
        "disabled": worker.disabled,
        "routable": worker.routable,
        "consecutive_failures": health.consecutive_failures,
        "consecutive_successes": health.consecutive_successes,
        "routed_requests": sum(worker.routed.values()),
        "successful_requests": sum(worker.succeeded.values()),
        "failed_requests": sum(worker.failed.values()),
        "routed_requests_by_class": worker.routed,
        "successful_requests_by_class": worker.succeeded,
        "failed_requests_by_class": worker.failed,
        "last_status_code": health.last_status_code,
        "last_error": health.last_error,
        "last_checked_at": checked.isoformat() if checked else None,
        "origin": worker.origin,
        "discovered": discovered_record(worker),
        "weight": worker.weight,
        "max_inflight": worker.max_inflight,
        "in_flight": worker.in_flight,
        "peak_in_flight": worker.peak_in_flight,
        "since": health.since.isoformat(),
        "registered_at": worker.registered_at.isoformat(),
        "held_by": sorted(worker.cordon_reasons),
        "half_open": health.is_half_open,
        "trial": health.is_half_open,  # the old name of half_open, for one release
        "weight_version": worker.weight_label,
        "weight_epoch": worker.weight_epoch,
        "health": worker.health_body,
        "role": worker.role,
        "kv_connector": worker.kv_connector if worker.role != "regular" else None,
        "bootstrap_port": worker.bootstrap_port if worker.role == "prefill" else None,
        "loras": worker.loras if isinstance(worker.loras, str) else list(worker.loras),
        "kv_mode": worker.kv_mode,
        "kv_reason": worker.kv_reason,
        "configured_ranks": worker.ranks,
        "ranks": [rank_record(rank, index) for index, rank in enumerate(worker.dp_ranks)],
    }


def engine_load_record(loads: EngineLoads, target: Worker) -> dict[str, object] | None:
    """The last load report of the engine of a worker or a rank; None if there is none."""
    load = target.engine_load
    if load is None:
        return None
    state = "overloaded" if loads.is_overloaded(target) else "ok"
    return {
        "waiting": load.report.waiting,
        "kv_usage": load.report.kv_usage,
        "age_secs": round(max(0.0, loads.now() - load.at), 3),
        "state": "stale" if loads.is_stale(load) else state,
    }


class WorkerRecords:
    """`state`: returns what the caller of the current request may see of it."""

    def __init__(
        self,
        workers: WorkerServices,
        data_plane: DataPlaneView,
        metrics: Metrics,
        notes: WorkerNotes,
        state: Callable[[], OperatorState],
    ) -> None:
        self._workers = workers
        self._fleet = workers.fleet
        self._data_plane = data_plane
        self._metrics = metrics
        self.notes = notes
        self._state = state

    def record(self, worker: Worker) -> dict[str, object]:
        state = self._state()
        return self._record(worker, reasons(self._workers, state), state)

    def pool(self, status: str, model: str | None = None) -> dict[str, object]:
        """The pool summary of note:omni-router 4; `model` narrows the records, not the counts."""
        workers = [w for w in self._fleet.workers if model is None or w.serves(model)]
        state = self._state()
        why = reasons(self._workers, state)
        return {
            "status": status,
            **self._fleet.count_by_state(),
            "workers": [self._record(worker, why, state) for worker in workers],
        }

    def _record(self, worker: Worker, why: Why, state: OperatorState) -> dict[str, object]:
        pause = state.pauses.get(worker.url)
        note = self.notes.get(worker)
        return {
            **worker_record(worker),
            "id": self.notes.public_id(worker),
            "why": why(worker),
            "paused": pause_record(pause),
            "disabled_by": disabled_by_record(worker, state.disabled_by),
            "draining": self._workers.drains.get_record(worker),
            "model_id": worker.model,
            "worker_type": worker.role,
            "connection_mode": "http",
            "is_healthy": worker.health.state is Health.HEALTHY,
            "status": GATEWAY_STATUS[worker.health.state],
            "load": worker.in_flight,
            "sessions": self._data_plane.session_count(worker),
            "prefix_cache": prefix_cache_record(self._metrics.cached_tokens.get(worker)),
            "engine_load": engine_load_record(self._fleet.loads, worker),
            "priority": note.priority,
            "cost": note.cost,
            "labels": note.labels,
            "ranks": [
                {
                    **rank_record(rank, index),
                    "sessions": self._data_plane.session_count(rank),
                    "engine_load": engine_load_record(self._fleet.loads, rank),
                }
                for index, rank in enumerate(worker.dp_ranks)
            ],
        }
