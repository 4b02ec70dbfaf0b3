"""Replication between the main process and its data-plane processes: snapshots out, events in.

Invariants: a snapshot is of one moment: rows, voice owner and configuration that belong together
are in one message. Events name a worker by its serial number, so that reports about a removed
worker don't count for a later one with the same URL. Each snapshot also grants leases of half-open
workers (`HalfOpenLeases`): the process with the lease may send the single request. A process gets a
lease only after the previous one has acknowledged its loss, so two processes never have it at the
same time. A lease is passed on after `LEASE_SECS`. Pure: the time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker, WorkerState
from omni_proxy.multiprocess.ipc.messages import (
    CallersMessage,
    ClusterHintsEvent,
    EngineLoadsEvent,
    HalfOpenEndedEvent,
    HalfOpenStartedEvent,
    LogLinesEvent,
    MetricsEvent,
    ProcessEvent,
    ProcessStats,
    RequestFailedEvent,
    RequestSucceededEvent,
    StateSnapshot,
    VoiceListMessage,
    VoicesChangedEvent,
)
from omni_proxy.multiprocess.load_reports import LoadCollector, take_rows
from omni_proxy.multiprocess.metrics_delta import merge_metrics
from omni_proxy.multiprocess.process_slot import ProcessHandle
from omni_proxy.multiprocess.shared_memory.worker_counters import WorkerIds
from omni_proxy.telemetry.instruments import Instruments


class SnapshotPublisher:
    """`config`: that of each data-plane process, see `per_process_config`."""

    def __init__(self, fleet: Fleet, worker_ids: WorkerIds) -> None:
        self.config: Config | None = None
        self.callers = CallersMessage()
        self._fleet = fleet
        self._worker_ids = worker_ids
        self._leases = HalfOpenLeases()
        self._voices = VoiceListMessage("", None)
        self._names: frozenset[str] | None = None  # the source of `_voices`
        self._revision = 0

    def send_all(self, handles: Sequence[ProcessHandle], *, heartbeat: bool = False) -> None:
        """Send each process its changes; with `heartbeat` a message even without changes."""
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
            callers=None if previous and self.callers is previous.callers else self.callers,
            voices=self._voice_list(),
            voice_changes=handle.voice_changes,
            processes=self._worker_ids.processes,
        )
        changed = previous is None or _without_rows(previous) != _without_rows(snapshot)
        new = (snapshot.rows, snapshot.config, snapshot.callers)
        if changed or heartbeat or any(part is not None for part in new):
            self._revision += 1
            handle.last_snapshot = structs.replace(
                snapshot, rows=rows, config=self.config, callers=self.callers
            )
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
        """The rows for a process: half-open workers are blocked unless it has their lease."""
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


LEASE_SECS: Final = 0.5


@dataclass(slots=True)
class _Lease:
    process: int
    since: float
    over: bool = False
    revoked_by: int = 0  # the number of the message that revokes it; 0 while it holds the lease


class HalfOpenLeases:
    """Leases of half-open workers. Workers are serial numbers, processes are indexes."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}

    def holder(self, worker: int) -> int | None:
        lease = self._leases.get(worker)
        return lease.process if lease is not None and not lease.over else None

    def rotate(
        self,
        half_open: Collection[int],
        processes: Sequence[int],
        now: float,
        acked: Callable[[int], int],
    ) -> set[int]:
        """Grant a lease for every worker in `half_open`, and revoke leases that are too old.

        `acked`: number of messages that a process has acknowledged. Returns the processes that lose
        a lease; the caller sends them a message, and calls `revoke` with its number.
        """
        revoked = self._drop_unneeded(half_open, processes, acked)
        for worker in half_open if processes else ():
            lease = self._leases.get(worker)
            if lease is None:
                self._leases[worker] = _Lease(processes[0], now)
            elif lease.process not in processes:
                self._leases[worker] = _Lease(_after(lease.process, processes), now)
            elif lease.revoked_by:
                if acked(lease.process) >= lease.revoked_by:
                    self._leases[worker] = _Lease(_after(lease.process, processes), now)
            elif len(processes) > 1 and now - lease.since >= LEASE_SECS:
                lease.over = True
                revoked.add(lease.process)
        return revoked

    def _drop_unneeded(
        self, half_open: Collection[int], processes: Sequence[int], acked: Callable[[int], int]
    ) -> set[int]:
        """Revoke leases of workers that are no longer half-open; each ends when its process has
        acknowledged that."""
        revoked: set[int] = set()
        for worker, lease in list(self._leases.items()):
            if worker in half_open:
                continue
            if not lease.revoked_by and lease.process in processes:
                lease.over = True
                revoked.add(lease.process)
            elif lease.process not in processes or acked(lease.process) >= lease.revoked_by:
                del self._leases[worker]
        return revoked

    def revoke(self, process: int, message: int) -> None:
        """Record that message number `message` revokes the expired leases of the process."""
        for lease in self._leases.values():
            if lease.process == process and lease.over and not lease.revoked_by:
                lease.revoked_by = message


def _after(process: int, processes: Sequence[int]) -> int:
    """The next process in the ring."""
    later = [other for other in sorted(processes) if other > process]
    return later[0] if later else min(processes)


@dataclass(frozen=True, slots=True)
class ReportHandler:
    """Applies events of data-plane processes. `loads`: forwards load reports to the other
    processes. `exited_counts`, `exited_outcomes`: counters of processes that have exited."""

    fleet: Fleet
    dataplane: DataPlane
    worker_ids: WorkerIds
    instruments: Instruments
    loads: LoadCollector
    exited_counts: Counter[str]
    exited_outcomes: Counter[str]

    def on_event(self, handle: ProcessHandle, message: ProcessEvent) -> None:
        match message:
            case LogLinesEvent():
                self._write_lines(message)
            case MetricsEvent():
                meters, recent = self.instruments.metrics, self.instruments.recent
                merge_metrics(message, meters, recent, self.worker_ids.find)
            case ClusterHintsEvent(prefixes, sessions):
                self.dataplane.cluster_hints.add_notes(prefixes, sessions)
            case EngineLoadsEvent(rows):
                for target in take_rows(self.fleet.loads, rows, self.worker_ids.find):
                    self.loads.add(target)
            case (
                RequestFailedEvent()
                | RequestSucceededEvent()
                | HalfOpenStartedEvent()
                | HalfOpenEndedEvent()
                | VoicesChangedEvent()
            ):
                if isinstance(message, VoicesChangedEvent):
                    handle.voice_changes += 1
                worker = self.worker_ids.find(message.serial)
                if worker is not None:
                    self._on_worker_event(worker, handle, message)

    def _write_lines(self, message: LogLinesEvent) -> None:
        logs = self.instruments.logs
        dropped = message.dropped
        for sink, lines, lost in (
            (logs["access_log"], message.access, dropped[0]),
            (logs["route_log"], message.route, dropped[1]),
            (self.instruments.spans, message.spans, dropped[2]),
        ):
            for line in lines:
                sink.write(line)
            sink.dropped += lost

    def _on_worker_event(
        self,
        worker: Worker,
        handle: ProcessHandle,
        message: RequestFailedEvent
        | RequestSucceededEvent
        | HalfOpenStartedEvent
        | HalfOpenEndedEvent
        | VoicesChangedEvent,
    ) -> None:
        fleet = self.fleet
        match message:
            case RequestFailedEvent(serial, status, error, at, half_open):
                number = handle.half_open_ids.get((serial, half_open), 0)
                fleet.observe_request_failure(
                    worker, status=status, error=error, at=at, half_open_id=number
                )
            case RequestSucceededEvent(serial, half_open):
                fleet.observe_success(worker, handle.half_open_ids.get((serial, half_open), 0))
            case HalfOpenStartedEvent(serial, half_open):
                handle.half_open_ids[serial, half_open] = fleet.begin_half_open(worker)
            case HalfOpenEndedEvent(serial, half_open):
                fleet.end_half_open(worker, handle.half_open_ids.pop((serial, half_open), 0))
            case VoicesChangedEvent():
                self.dataplane.keep_voices_at(worker)

    def on_process_exit(self, handle: ProcessHandle) -> None:
        """End the half-open requests of a process that exited, and keep its counters."""
        for (serial, _), half_open in handle.half_open_ids.items():
            worker = self.worker_ids.find(serial)
            if worker is not None:
                self.fleet.end_half_open(worker, half_open)
        handle.half_open_ids.clear()
        if isinstance(handle.stats, ProcessStats):
            self.exited_counts.update(handle.stats.counts)
            self.exited_outcomes.update(handle.stats.ended)
