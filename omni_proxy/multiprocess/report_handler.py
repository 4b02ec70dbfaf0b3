"""Applies the events of data-plane processes: to the fleet, the metrics and the logs.

Each goes where the same thing goes with one process. Invariant: events name a worker by its serial
number, so that nothing about a removed worker counts against a later one with the same URL.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.ipc import (
    HalfOpenEndedEvent,
    HalfOpenStartedEvent,
    LogLinesEvent,
    MetricsEvent,
    ProcessEvent,
    ProcessStats,
    RequestFailedEvent,
    RequestSucceededEvent,
    VoicesChangedEvent,
)
from omni_proxy.multiprocess.metrics_delta import merge_metrics
from omni_proxy.multiprocess.process_slot import ProcessHandle
from omni_proxy.multiprocess.shared_counters import WorkerIds
from omni_proxy.telemetry.instruments import Instruments


@dataclass(frozen=True, slots=True)
class ReportHandler:
    """`exited_counts`, `exited_outcomes`: counters of processes that have exited."""

    fleet: Fleet
    dataplane: DataPlane
    worker_ids: WorkerIds
    instruments: Instruments
    exited_counts: Counter[str]
    exited_outcomes: Counter[str]

    def on_event(self, handle: ProcessHandle, message: ProcessEvent) -> None:
        match message:
            case LogLinesEvent(access, route, dropped):
                logs = self.instruments.logs
                for line in access:
                    logs["access_log"].write(line)
                for line in route:
                    logs["route_log"].write(line)
                logs["access_log"].dropped += dropped
            case MetricsEvent():
                meters, recent = self.instruments.metrics, self.instruments.recent
                merge_metrics(message, meters, recent, self.worker_ids.find)
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
        """Its half-open requests are over; what it counted stays counted."""
        for (serial, _), half_open in handle.half_open_ids.items():
            worker = self.worker_ids.find(serial)
            if worker is not None:
                self.fleet.end_half_open(worker, half_open)
        handle.half_open_ids.clear()
        if isinstance(handle.stats, ProcessStats):
            self.exited_counts.update(handle.stats.counts)
            self.exited_outcomes.update(handle.stats.ended)
