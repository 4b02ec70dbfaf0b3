"""A worker's standing as one value, so that another process can have the same fleet.

Invariant: `put(worker, row_of(...))` leaves nothing out that decides whether and for what the
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

ELSEWHERE: Final = -1  # in `HealthMachine.trial`: somebody else's, or not for us to begin


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
    owes: bool  # a trial
    blocked: bool  # ... which runs already, or is another door's to begin
    trials: int  # how many it has been given so far
    holds: tuple[str, ...]
    label: str | None
    epoch: int
    hop_line: bytes = b""


def row_of(worker: Worker, serial: int, cell: int) -> WorkerState:
    machine = worker.machine
    return WorkerState(
        entry=entry_of(worker),
        serial=serial,
        cell=cell,
        address=worker.address,
        state=machine.state,
        last_error=machine.last_error,
        failed=machine.failed_tries > 0,
        owes=machine.trial_owed,
        blocked=machine.trial_owed and machine.trial != 0,
        trials=machine.trials,
        holds=tuple(sorted(worker.holds)),
        label=worker.version.label,
        epoch=worker.version.epoch,
        hop_line=worker.hop_line,
    )


def entry_of(worker: Worker) -> WorkerSpec:
    """What `worker.matches`."""
    return WorkerSpec(**{field.name: getattr(worker, field.name) for field in fields(WorkerSpec)})


def put(worker: Worker, row: WorkerState) -> bool:
    """All of it but the entry and the trial; whether that can alter a pick or a request."""
    machine = worker.machine
    before = (machine.state, machine.trial_owed, worker.holds, worker.version, worker.hop_line)
    worker.hop_line = row.hop_line
    worker.address = row.address
    worker.holds = set(row.holds)
    if (worker.version.label, worker.version.epoch) != (row.label, row.epoch):
        worker.version = WeightVersion(row.label, row.epoch)
    machine.state = row.state
    machine.last_error = row.last_error
    machine.failed_tries = int(row.failed)
    machine.trial_owed = row.owes
    now = (machine.state, machine.trial_owed, worker.holds, worker.version, worker.hop_line)
    return before != now
