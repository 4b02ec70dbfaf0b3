"""What doors tell, put where the same thing goes with one process: fleet, meters, logs.

Invariant: a worker is named by its serial number, so that nothing learnt of one that is gone is
held against one that has its URL now.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.messages import (
    Failed,
    Good,
    KeptVoices,
    LogLines,
    ProcessStats,
    Tally,
    ToControl,
    TrialBegan,
    TrialEnded,
)
from omni_proxy.multiprocess.metrics_delta import add
from omni_proxy.multiprocess.process_slot import ProcessHandle
from omni_proxy.multiprocess.worker_ids import WorkerIds
from omni_proxy.telemetry.instruments import Instruments


@dataclass(frozen=True, slots=True)
class ReportHandler:
    """`gone` and `gone_ended`: the counters of doors that have ended."""

    fleet: Fleet
    door: DataPlane
    roster: WorkerIds
    instruments: Instruments
    gone: Counter[str]
    gone_ended: Counter[str]

    def hear(self, link: ProcessHandle, message: ToControl) -> None:
        match message:
            case LogLines(access, route, dropped):
                logs = self.instruments.logs
                for line in access:
                    logs["access_log"].write(line)
                for line in route:
                    logs["route_log"].write(line)
                logs["access_log"].dropped += dropped
            case Tally():
                meters, recent = self.instruments.meters, self.instruments.recent
                add(message, meters, recent, self.roster.find)
            case Failed() | Good() | TrialBegan() | TrialEnded() | KeptVoices():
                if isinstance(message, KeptVoices):
                    link.voice_changes += 1
                worker = self.roster.find(message.serial)
                if worker is not None:
                    self._hear_of(worker, link, message)

    def _hear_of(
        self,
        worker: Worker,
        link: ProcessHandle,
        message: Failed | Good | TrialBegan | TrialEnded | KeptVoices,
    ) -> None:
        fleet = self.fleet
        match message:
            case Failed(serial, status, error, at, trial):
                number = link.trials.get((serial, trial), 0)
                fleet.observe_request_failure(
                    worker, status=status, error=error, at=at, half_open_id=number
                )
            case Good(serial, trial):
                fleet.observe_success(worker, link.trials.get((serial, trial), 0))
            case TrialBegan(serial, trial):
                link.trials[serial, trial] = fleet.begin_half_open(worker)
            case TrialEnded(serial, trial):
                fleet.end_half_open(worker, link.trials.pop((serial, trial), 0))
            case KeptVoices():
                self.door.keep_voices_at(worker)

    def bury(self, link: ProcessHandle) -> None:
        """It has ended: what it had under way is over, what it counted stays counted."""
        for (serial, _), trial in link.trials.items():
            worker = self.roster.find(serial)
            if worker is not None:
                self.fleet.end_half_open(worker, trial)
        link.trials.clear()
        if isinstance(link.stand, ProcessStats):
            self.gone.update(link.stand.counts)
            self.gone_ended.update(link.stand.ended)
