"""Every live request: admitted, moved from stage to stage, delivered, or ended early.

    pending ──first output──> running ──all results──> completed ─┐
       └──────────┴──fault──> failed, ──abort──> aborted ─────────┴─reader gone─> (forgotten)
Invariant: a request ends once; an early end is told to the stages before its reader. An id stays
taken until its reader is gone. All methods but `admin` are atoms and run in the trio thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from omni_proxy.replica.pipeline.coordination.delivery import (
    DeliveredChunk,
    Delivery,
    DeliveryBacklog,
    DeliveryEnd,
)
from omni_proxy.replica.pipeline.coordination.request_flow import RequestFlow, Sends
from omni_proxy.replica.pipeline.coordination.stage_operations import Aggregate, StageOperations
from omni_proxy.replica.pipeline.messages import (
    Abort,
    Admin,
    AdminResult,
    OmniRequest,
    ProfilerStart,
    ProfilerStop,
    Result,
    ResultChunk,
    StageEnded,
    StageFailure,
    StageInput,
    StageOutput,
    StageReady,
    StageStats,
    Submit,
)
from omni_proxy.replica.pipeline.plan import FlowError, Plan
from omni_proxy.replica.pipeline.requests import QueueFullError, RequestAborted, RequestFailed
from omni_proxy.replica.profiling.recorder import EventRecorder

log = logging.getLogger(__name__)

NOT_RUNNING = "the server is not running: it has stopped or is about to"


class StageUnavailable(Exception):
    """A message cannot reach its stage now; the text says why."""


class StageTransport(Protocol):
    """Whoever holds the stages. `send` never blocks; raises StageUnavailable."""

    def send(self, stage: str, message: StageInput) -> None: ...


class RequestState(StrEnum):
    """The diagram is above."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class _Request:
    flow: RequestFlow
    delivery: Delivery
    state: RequestState = RequestState.PENDING

    @property
    def live(self) -> bool:
        return self.state in (RequestState.PENDING, RequestState.RUNNING)


class Coordinator:
    """The hub; stages post to `receive`, the client opens, reads and releases deliveries."""

    def __init__(self, plan: Plan, switchboard: StageTransport) -> None:
        self.plan = plan
        self.running = True
        self.backlog = DeliveryBacklog(self._cut)
        self.profiling_run_id: str | None = None
        self._switchboard = switchboard
        self._requests: dict[str, _Request] = {}
        self._ready: dict[str, dict[str, Any]] = {}
        self._down: dict[str, str] = {}
        self._ever_ready = False
        self._stats: dict[str, dict[str, float]] = {}
        self._desk = StageOperations(self._send)
        self._recorder = EventRecorder("coordinator")

    # Requests

    def open(self, request_id: str, request: OmniRequest) -> Delivery:
        """Admit a request and start it; whoever opened it must `release` the delivery.

        Raises QueueFullError, or RequestFailed: 400 for an id that is taken, 503 when stopped or
        where a stage is down, 500 where the pipeline leads it astray at once.
        """
        if not self.running:
            raise RequestFailed(NOT_RUNNING, 503)
        if request_id in self._requests:
            raise RequestFailed(f"Request {request_id} already exists", 400)
        bound = self.plan.config.max_in_flight
        if bound and self.live_count >= bound:
            raise QueueFullError
        flow = RequestFlow(self.plan, request_id, request)
        entry = _Request(flow, self.backlog.open(request_id))
        self._requests[request_id] = entry
        self._record("request_admission", request_id, {"entry_stage": self.plan.entry_for(request)})
        self._advance(entry, flow.begin)
        if isinstance(entry.delivery.end, RequestFailed):
            self.release(entry.delivery)
            raise entry.delivery.end
        return entry.delivery

    def abort(self, request_id: str) -> bool:
        """End a request early; False where it is not known or has ended already."""
        entry = self._requests.get(request_id)
        if entry is None or not entry.live:
            return False
        self._end_early(entry, RequestState.ABORTED, RequestAborted())
        return True

    def release(self, delivery: Delivery) -> None:
        """The reader is gone: what has not ended is aborted, and the id is free again."""
        entry = self._requests.get(delivery.request_id)
        if entry is not None and entry.delivery is delivery:
            self.abort(delivery.request_id)
            del self._requests[delivery.request_id]
            self.backlog.close(delivery)

    @property
    def live_count(self) -> int:
        return sum(entry.live for entry in self._requests.values())

    # What stages say

    def receive(self, message: StageOutput) -> None:
        match message:
            case ResultChunk(request_id):
                if entry := self._live(request_id):
                    self._streamed(entry, message)
            case Result(request_id):
                if entry := self._live(request_id):
                    self._finished(entry, message)
            case StageFailure(request_id):
                if entry := self._live(request_id):
                    self._failed(entry, message)
            case AdminResult():
                self._desk.receive(message)
            case _:
                self._stage_told(message)

    def _stage_told(self, message: StageReady | StageEnded | StageStats) -> None:
        match message:
            case StageStats(stage, values):
                self._stats[stage] = values
            case StageReady(stage, info):
                self._ready[stage] = info
                self._down.pop(stage, None)
                self._ever_ready = self._ever_ready or self._ready.keys() >= self.plan.stages.keys()
            case StageEnded(stage, error):
                self._stage_ended(stage, error)

    def _streamed(self, entry: _Request, message: ResultChunk) -> None:
        stage = message.stage
        seen = {"from_stage": stage, "chunk_id": message.chunk_id, "modality": message.modality}
        # Two names of one event: reports over these files look for either.
        self._record("coordinator_stream_received", message.request_id, seen)
        self._record("stage_stream_chunk_received", message.request_id, seen)
        entry.state = RequestState.RUNNING
        self._advance(entry, lambda: entry.flow.streamed(message))
        if self.plan.stages[stage].config.terminal and entry.flow.owes(stage):
            entry.delivery.put(DeliveredChunk(stage, message.chunk))

    def _finished(self, entry: _Request, message: Result) -> None:
        stage = message.stage
        entry.state = RequestState.RUNNING
        self._advance(entry, lambda: self._onward(entry, message))
        if stage in entry.flow.results:
            told = {"from_stage": stage, "success": True}
            self._record("terminal_response", message.request_id, told)
            if entry.live:
                entry.delivery.put(DeliveredChunk(stage, message.data, whole=True))

    def _onward(self, entry: _Request, message: Result) -> Sends:
        """What follows a stage's result; only here it is known which stages those are."""
        sends = entry.flow.finished(message.stage, message.data)
        told: dict[str, Any] = {"terminal": message.stage in entry.flow.results}
        if following := list(dict.fromkeys(stage for stage, _ in sends)):
            told["next"] = following
        self._recorder.record("stage_complete", message.request_id, message.stage, told)
        return sends

    def _failed(self, entry: _Request, message: StageFailure) -> None:
        told = {"from_stage": message.stage, "success": False}
        self._record("terminal_response", message.request_id, told)
        if message.kind == "dropped":
            self._end_early(entry, RequestState.ABORTED, RequestAborted())
        else:
            status = 400 if message.kind == "caller" else 500
            self._end_early(entry, RequestState.FAILED, RequestFailed(message.error, status))

    def _stage_ended(self, stage: str, error: str) -> None:
        reason = error or "it was shut down"
        self._ready.pop(stage, None)
        self._stats.pop(stage, None)
        if self.running:
            self._down[stage] = reason
        for entry in list(self._requests.values()):
            if entry.live and entry.flow.owes(stage):
                fault = RequestFailed(f"stage {stage} ended: {reason}", 500)
                self._end_early(entry, RequestState.FAILED, fault)
        self._desk.stage_ended(stage, reason)

    # The ways of a request

    def _live(self, request_id: str) -> _Request | None:
        entry = self._requests.get(request_id)
        return entry if entry is not None and entry.live else None

    def _advance(self, entry: _Request, step: Any) -> None:
        """Let the flow take one step and send what it says; any fault ends this request alone."""
        try:
            sends: Sends = step()
            for stage, message in sends:
                self._send(stage, message)
            if entry.flow.done:
                self._complete(entry)
        except StageUnavailable as fault:
            self._end_early(entry, RequestState.FAILED, RequestFailed(str(fault), 503))
        except FlowError as fault:
            self._end_early(entry, RequestState.FAILED, RequestFailed(str(fault), 500))
        except Exception as fault:  # a route or a merge is anyone's code
            log.exception("request %s was led astray", entry.flow.request_id)
            reason = f"{type(fault).__name__}: {fault}"
            self._end_early(entry, RequestState.FAILED, RequestFailed(reason, 500))

    def _complete(self, entry: _Request) -> None:
        results = entry.flow.results
        merged = self.plan.terminal_merge(results) if len(results) > 1 else results
        entry.state = RequestState.COMPLETED
        entry.delivery.finish(DeliveryEnd(merged))

    def _end_early(self, entry: _Request, state: RequestState, end: RequestFailed) -> None:
        entry.state = state
        self._broadcast(Abort(entry.flow.request_id))
        entry.delivery.finish(end)

    def _cut(self, request_id: str, error: RequestFailed) -> None:
        if entry := self._live(request_id):
            self._end_early(entry, RequestState.FAILED, error)
        elif known := self._requests.get(request_id):
            known.delivery.end = error  # its end was not taken yet, and pieces before it are lost

    def _send(self, stage: str, message: StageInput) -> None:
        if stage in self._down and not isinstance(message, Abort | ProfilerStart | ProfilerStop):
            raise StageUnavailable(
                f"stage {stage} is not running ({self._down[stage]}); try again later"
            )
        if isinstance(message, Submit) and message.from_stage:
            to = {"to_stage": stage, "transport": "coordinator"}
            request_id = message.payload.request_id
            self._recorder.record("stage_hop_sent", request_id, message.from_stage, to)
        self._switchboard.send(stage, message)

    def _record(self, event: str, request_id: str, seen: dict[str, Any]) -> None:
        self._recorder.record(event, request_id, "coordinator", seen)

    def _broadcast(self, message: StageInput) -> None:
        for stage in self.plan.stages:
            try:
                self._switchboard.send(stage, message)
            except StageUnavailable:
                continue  # it holds nothing any more

    # The whole

    def health(self) -> dict[str, Any]:
        """The body of GET /health (api-server.md 1.1); `failed_stages` only where there are."""
        if not self.running or self._down:
            status = "unhealthy"
        else:
            status = "healthy" if self._ever_ready else "starting"
        states = Counter(entry.state.value for entry in self._requests.values())
        body: dict[str, Any] = {
            "status": status,
            "running": self.running,
            "stages": list(self.plan.stages),
            "entry_stage": self.plan.config.entry,
            "total_requests": len(self._requests),
            "pending_completions": self.live_count,
            "request_states": dict(states),
            "stream_delivery": self.backlog.counters(),
        }
        return body | ({"failed_stages": dict(self._down)} if self._down else {})

    def stats(self) -> dict[str, dict[str, float]]:
        """The newest gauges of each stage that has told any."""
        return {stage: dict(values) for stage, values in self._stats.items()}

    def stage_info(self) -> dict[str, dict[str, Any]]:
        """What each ready stage said of itself."""
        return dict(self._ready)

    async def admin(
        self,
        action: str,
        payload: dict[str, Any],
        stages: list[str] | None = None,
        timeout_s: float | None = None,
    ) -> Aggregate:
        """Run one operation on the stages and return the aggregate of api-server.md 2.2.

        Raises RequestFailed: 400 for an unknown stage, 503 when stopped, 504 past the timeout.
        """
        if not self.running:
            raise RequestFailed(NOT_RUNNING, 503)
        chosen = self._desk.chosen(stages, self.plan)
        everything = set(chosen) == set(self.plan.stages)
        dropping = action == "pause_generation" and payload.get("mode", "abort") == "abort"
        before = list(self._requests.values())
        try:
            operation = Admin("", action, payload, timeout_s)
            return await self._desk.run(operation, chosen, self._ready)
        finally:
            if everything and dropping:
                for entry in before:
                    if entry.live:
                        self._end_early(entry, RequestState.ABORTED, RequestAborted())

    def profiler_start(self, start: ProfilerStart) -> None:
        """Tell every stage; nobody answers (api-server.md 4)."""
        self.profiling_run_id = start.run_id
        if start.event_dir:
            self._recorder.start(start.run_id, start.event_dir)
        self._broadcast(start)

    def profiler_stop(self, run_id: str | None = None) -> str | None:
        """Tell every stage; returns the given id, else the active one."""
        active = self.profiling_run_id
        if run_id is None or run_id == active:
            self.profiling_run_id = None
        self._recorder.stop(run_id)
        self._broadcast(ProfilerStop(run_id))
        return run_id or active

    def stop(self) -> None:
        """Fail everything that is live and refuse what comes later."""
        self.running = False
        for entry in list(self._requests.values()):
            if entry.live:
                self._end_early(entry, RequestState.FAILED, RequestFailed(NOT_RUNNING, 503))
        self._desk.stop(NOT_RUNNING)
        self._recorder.stop()
