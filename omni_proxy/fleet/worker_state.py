"""A worker's standing as one value, so that another process can have the same fleet.

Invariant: `apply_state(worker, row_of(...))` leaves nothing out that decides whether and for what the
worker is picked. Health is judged in one process only; the others are told what it came to.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from msgspec import Struct

from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.weight_version import WeightVersion
from omni_proxy.fleet.worker import Worker

HALF_OPEN_ELSEWHERE: Final = (
    -1
)  # in `HealthMachine.half_open_id`: somebody else's, or not for us to begin


class WorkerState(Struct, frozen=True, array_like=True):
    """`serial` tells two workers apart that had the same URL one after the other; `cell` is where
    its requests are counted."""

    entry: WorkerSpec
    serial: int
    cell: int
    address: tuple[str, int] | str
    state: Health
    last_error: str | None
    failed: bool  # request failures without a good answer since
    breaker_tripped: bool  # a trial
    half_open_taken: bool  # ... which runs already, or is another door's to begin
    half_open_count: int  # how many it has been given so far
    cordon_reasons: tuple[str, ...]
    label: str | None
    epoch: int
    hop_line: bytes = b""


def worker_state(worker: Worker, serial: int, cell: int) -> WorkerState:
    machine = worker.health
    return WorkerState(
        entry=configured_entry(worker),
        serial=serial,
        cell=cell,
        address=worker.address,
        state=machine.state,
        last_error=machine.last_error,
        failed=machine.failed_requests > 0,
        breaker_tripped=machine.breaker_tripped,
        half_open_taken=machine.breaker_tripped and machine.half_open_id != 0,
        half_open_count=machine.half_open_count,
        cordon_reasons=tuple(sorted(worker.cordon_reasons)),
        label=worker.version.label,
        epoch=worker.version.epoch,
        hop_line=worker.hop_line,
    )


def configured_entry(worker: Worker) -> WorkerSpec:
    """What `worker.matches`."""
    return WorkerSpec(**{field.name: getattr(worker, field.name) for field in fields(WorkerSpec)})


def apply_state(worker: Worker, row: WorkerState) -> bool:
    """All of it but the entry and the trial; whether that can alter a pick or a request."""
    machine = worker.health
    before = (
        machine.state,
        machine.breaker_tripped,
        worker.cordon_reasons,
        worker.version,
        worker.hop_line,
    )
    worker.hop_line = row.hop_line
    worker.address = row.address
    worker.cordon_reasons = set(row.cordon_reasons)
    if (worker.version.label, worker.version.epoch) != (row.label, row.epoch):
        worker.version = WeightVersion(row.label, row.epoch)
    machine.state = row.state
    machine.last_error = row.last_error
    machine.failed_requests = int(row.failed)
    machine.breaker_tripped = row.breaker_tripped
    now = (
        machine.state,
        machine.breaker_tripped,
        worker.cordon_reasons,
        worker.version,
        worker.hop_line,
    )
    return before != now
