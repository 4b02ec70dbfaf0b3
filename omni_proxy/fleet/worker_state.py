"""The state of a worker as one value, so that another process can route by the same fleet.

Invariant: `apply_state(worker, worker_state(...))` leaves out nothing that decides whether and for
what the worker is picked. Only the main process judges health; the others are sent its result.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from msgspec import Struct

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker

HALF_OPEN_ELSEWHERE: Final = -1  # a `half_open_id`: the request is, or may be, another process's


class WorkerState(Struct, frozen=True, array_like=True):
    """`serial` differs for two workers that had the same URL one after the other; `cell` is the
    index of its shared in-flight counter."""

    entry: WorkerSpec
    serial: int
    cell: int
    address: tuple[str, int] | str
    state: Health
    last_error: str | None
    failed: bool  # some request failed since the last successful one
    breaker_tripped: bool  # ejected, and no half-open request has succeeded yet
    half_open_taken: bool  # one is in flight, or only another process may begin it
    half_open_count: int  # half-open requests begun so far
    cordon_reasons: tuple[str, ...]
    label: str | None
    epoch: int
    hop_line: bytes = b""


def worker_state(worker: Worker, serial: int, cell: int) -> WorkerState:
    health = worker.health
    return WorkerState(
        entry=configured_entry(worker),
        serial=serial,
        cell=cell,
        address=worker.address,
        state=health.state,
        last_error=health.last_error,
        failed=health.failed_requests > 0,
        breaker_tripped=health.breaker_tripped,
        half_open_taken=health.breaker_tripped and health.half_open_id != 0,
        half_open_count=health.half_open_count,
        cordon_reasons=tuple(sorted(worker.cordon_reasons)),
        label=worker.version.label,
        epoch=worker.version.epoch,
        hop_line=worker.hop_line,
    )


def configured_entry(worker: Worker) -> WorkerSpec:
    """The spec that `worker.matches`."""
    return WorkerSpec(**{field.name: getattr(worker, field.name) for field in fields(WorkerSpec)})


def apply_state(worker: Worker, state: WorkerState) -> bool:
    """Apply all but the spec and the half-open request; whether a pick or a request can change."""
    health = worker.health
    before = (
        health.state,
        health.breaker_tripped,
        worker.cordon_reasons,
        worker.version,
        worker.hop_line,
    )
    worker.hop_line = state.hop_line
    worker.address = state.address
    worker.cordon_reasons = set(state.cordon_reasons)
    if (worker.version.label, worker.version.epoch) != (state.label, state.epoch):
        worker.version = WeightVersion(state.label, state.epoch)
    health.state = state.state
    health.last_error = state.last_error
    health.failed_requests = int(state.failed)
    health.breaker_tripped = state.breaker_tripped
    now = (
        health.state,
        health.breaker_tripped,
        worker.cordon_reasons,
        worker.version,
        worker.hop_line,
    )
    return before != now
