"""Sends every data-plane process what has changed of the fleet and the configuration.

Invariant: a snapshot is of one moment: rows, voice owner and configuration that belong together
come in one message. Which process may send a half-open worker its one request is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from omni_proxy.config.schema import Config
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import WorkerState
from omni_proxy.multiprocess.half_open_leases import HalfOpenLeases
from omni_proxy.multiprocess.messages import StateSnapshot, VoiceListMessage
from omni_proxy.multiprocess.process_slot import ProcessHandle
from omni_proxy.multiprocess.worker_ids import WorkerIds


class SnapshotPublisher:
    """`config`: of each data-plane process, see `per_process_config`."""

    def __init__(self, fleet: Fleet, worker_ids: WorkerIds) -> None:
        self.config: Config | None = None
        self._fleet = fleet
        self._worker_ids = worker_ids
        self._leases = HalfOpenLeases()
        self._voices = VoiceListMessage("", None)
        self._names: frozenset[str] | None = None  # of which `_voices` was made
        self._revision = 0

    def send_all(self, handles: Sequence[ProcessHandle], *, heartbeat: bool = False) -> None:
        """Send what is new to each process; with `heartbeat` something to every one."""
        rows = self._worker_ids.rows() if handles else ()
        for handle in handles:
            self._send_changes(handle, rows, heartbeat=heartbeat)

    def _send_changes(
        self, handle: ProcessHandle, all_rows: tuple[WorkerState, ...], *, heartbeat: bool
    ) -> None:
        rows = self._rows_for(handle, all_rows)
        previous = handle.last_snapshot
        snapshot = StateSnapshot(
            revision=self._revision + 1,
            rows=None if previous and rows == previous.rows else rows,
            config=None if previous and self.config is previous.config else self.config,
            voices=self._voice_list(),
            voice_changes=handle.voice_changes,
            processes=self._worker_ids.processes,
        )
        changed = previous is None or _without_rows(previous) != _without_rows(snapshot)
        if changed or snapshot.rows is not None or snapshot.config is not None or heartbeat:
            self._revision += 1
            handle.last_snapshot = structs.replace(snapshot, rows=rows, config=self.config)
            handle.send(snapshot)

    def rotate_leases(self, handles: Sequence[ProcessHandle], now: float) -> None:
        half_open = [
            self._worker_ids.serial(worker)
            for worker in self._fleet.workers
            if worker.health.is_half_open and not worker.health.half_open_id
        ]
        by_index = {handle.index: handle for handle in handles if handle.listening}
        acked = {index: handle.acked for index, handle in by_index.items()}
        revoked = self._leases.rotate(half_open, sorted(by_index), now, lambda index: acked[index])
        for index in revoked:
            handle = by_index[index]
            self._leases.revoke(index, handle.sent + 1)
            self.send_all([handle], heartbeat=True)

    def _voice_list(self) -> VoiceListMessage:
        registry, previous = self._worker_ids.voices, self._voices
        if registry.owner != previous.owner or registry.names is not self._names:
            names = registry.names
            self._names = names
            previous = VoiceListMessage(
                registry.owner, None if names is None else tuple(sorted(names))
            )
            self._voices = previous
        return previous

    def _rows_for(
        self, handle: ProcessHandle, rows: tuple[WorkerState, ...]
    ) -> tuple[WorkerState, ...]:
        """A half-open worker is blocked for every process but the one that has its lease."""
        if not any(row.breaker_tripped for row in rows):
            return rows
        return tuple(
            structs.replace(row, half_open_taken=True)
            if row.breaker_tripped
            and row.state is Health.HEALTHY
            and not self._has_lease(handle, row)
            else row
            for row in rows
        )

    def _has_lease(self, handle: ProcessHandle, row: WorkerState) -> bool:
        return self._leases.holder(row.serial) == handle.index


def _without_rows(snapshot: StateSnapshot) -> tuple[object, ...]:
    return snapshot.voices, snapshot.voice_changes, snapshot.processes
