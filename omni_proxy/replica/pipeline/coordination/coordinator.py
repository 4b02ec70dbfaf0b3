"""The coordinator: admits requests, moves them from stage to stage, delivers or ends them.

    pending ──first output──> running ──all results──> completed ─┐
       └──────────┴──error──> failed, ──abort──> aborted ─────────┴──release──> (removed)
Invariant: a request ends once; an early end is sent to the stages before the reader gets it. An id
is in use until its reader releases the delivery. All methods except `admin` are synchronous and run
in the trio thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from omni_proxy.replica.pipeline.config import FlowError, Plan
from omni_proxy.replica.pipeline.coordination.delivery import (
    DeliveredChunk,
    Delivery,
    DeliveryBacklog,
    DeliveryEnd,
)
from omni_proxy.replica.pipeline.coordination.request_flow import RequestFlow, Sends
from omni_proxy.replica.pipeline.coordination.stage_operations import Aggregate, StageOperations
from omni_proxy.replica.pipeline.instrumentation import EventRecorder
from omni_proxy.replica.pipeline.requests import QueueFullError, RequestAborted, RequestFailed
from omni_proxy.replica.pipeline.stage_messages import (
    Abort,
    Admin,
    AdminResult,
    EndEarly,
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

log = logging.getLogger(__name__)

NOT_RUNNING = "the server is not running: it has stopped or is about to"


class StageUnavailable(Exception):
    """A message cannot be sent to its stage now; the text is the reason."""


class StageTransport(Protocol):
    """Sends messages to stages. `send` never blocks; raises StageUnavailable."""

    def send(self, stage: str, message: StageInput) -> None: ...


class RequestState(StrEnum):
    """The state of a request; see the diagram in the module's docstring."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class _Request:
    """A request; with `ends_early`, its next stage must end it as soon as it receives it."""

    flow: RequestFlow
    delivery: Delivery
    state: RequestState = RequestState.PENDING
    ends_early: bool = False

    @property
    def live(self) -> bool:
        return self.state in (RequestState.PENDING, RequestState.RUNNING)


class Coordinator:
    """Stages call `receive`; the client opens, reads and releases deliveries."""

    def __init__(self, plan: Plan, transport: StageTransport) -> None:
        self.plan = plan
        self.running = True
        self.backlog = DeliveryBacklog(self._end_slow_reader)
        self.profiling_run_id: str | None = None
        self._transport = transport
        self._requests: dict[str, _Request] = {}
        self._ready: dict[str, dict[str, Any]] = {}
        self._down: dict[str, str] = {}
        self._was_ready = False
        self._stats: dict[str, dict[str, float]] = {}
        self._operations = StageOperations(self._send)
        self._recorder = EventRecorder("coordinator")

    # Requests

    def open(self, request_id: str, request: OmniRequest) -> Delivery:
        """Admit and start a request; the caller must `release` the delivery.

        Raises QueueFullError, or RequestFailed: 400 for an id that is in use, 503 when stopped or
        if a stage is down, 500 if routing fails.
        """
        if not self.running:
            raise RequestFailed(NOT_RUNNING, 503)
        if request_id in self._requests:
            raise RequestFailed(f"Request {request_id} already exists", 400)
        limit = self.plan.config.max_in_flight
        if limit and self.live_count >= limit:
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
        """End a request early; False if it is unknown or has ended."""
        entry = self._requests.get(request_id)
        if entry is None or not entry.live:
            return False
        self._end_early(entry, RequestState.ABORTED, RequestAborted())
        return True

    def end_early(self, wanted: Callable[[str], bool]) -> list[str]:
        """End the live requests whose id is `wanted`, with their partial output; return their ids.

        The stage that generates a request's text ends it with `finish_reason` abort. If the
        request is at another stage, and that stage does not pass it to one that can end requests
        early, the request is aborted.
        """
        ended = [
            entry
            for request_id, entry in list(self._requests.items())
            if entry.live and wanted(request_id)
        ]
        for entry in ended:
            pending = [stage for stage in self.plan.stages if entry.flow.is_pending(stage)]
            if all(self._may_end_early(stage) for stage in pending):
                entry.ends_early = True
                self._send_end(entry, pending)
            else:
                self._end_early(entry, RequestState.ABORTED, RequestAborted())
        return [entry.flow.request_id for entry in ended]

    def _may_end_early(self, stage: str) -> bool:
        """Whether the stage can, or passes its result to one that can."""
        following = self.plan.stages[stage].config.targets
        return any(self._ready.get(name, {}).get("ends_early") for name in (stage, *following))

    def _send_end(self, entry: _Request, stages: Iterable[str]) -> None:
        for stage in stages:
            if self._ready.get(stage, {}).get("ends_early"):
                with suppress(StageUnavailable):  # the end of the stage fails the request
                    self._send(stage, EndEarly(entry.flow.request_id))

    def release(self, delivery: Delivery) -> None:
        """Called when the reader ends: abort the request unless it has ended, and free its id."""
        entry = self._requests.get(delivery.request_id)
        if entry is not None and entry.delivery is delivery:
            self.abort(delivery.request_id)
            del self._requests[delivery.request_id]
            self.backlog.close(delivery)

    @property
    def live_count(self) -> int:
        return sum(entry.live for entry in self._requests.values())

    # Messages of stages

    def receive(self, message: StageOutput) -> None:
        match message:
            case ResultChunk(request_id):
                if entry := self._live(request_id):
                    self._on_chunk(entry, message)
            case Result(request_id):
                if entry := self._live(request_id):
                    self._on_result(entry, message)
            case StageFailure(request_id):
                if entry := self._live(request_id):
                    self._on_failure(entry, message)
            case AdminResult():
                self._operations.receive(message)
            case _:
                self._on_stage_status(message)

    def _on_stage_status(self, message: StageReady | StageEnded | StageStats) -> None:
        match message:
            case StageStats(stage, values):
                self._stats[stage] = values
            case StageReady(stage, info):
                self._ready[stage] = info
                self._down.pop(stage, None)
                self._was_ready = self._was_ready or self._ready.keys() >= self.plan.stages.keys()
            case StageEnded(stage, error):
                self._on_stage_ended(stage, error)

    def _on_chunk(self, entry: _Request, message: ResultChunk) -> None:
        stage = message.stage
        metadata = {"from_stage": stage, "chunk_id": message.chunk_id, "modality": message.modality}
        # Record one event under two names: each is read by some report tools.
        self._record("coordinator_stream_received", message.request_id, metadata)
        self._record("stage_stream_chunk_received", message.request_id, metadata)
        entry.state = RequestState.RUNNING
        self._advance(entry, lambda: entry.flow.streamed(message))
        if self.plan.stages[stage].config.terminal and entry.flow.is_pending(stage):
            entry.delivery.put(DeliveredChunk(stage, message.chunk))

    def _on_result(self, entry: _Request, message: Result) -> None:
        stage = message.stage
        entry.state = RequestState.RUNNING
        self._advance(entry, lambda: self._next_sends(entry, message))
        if stage in entry.flow.results:
            metadata = {"from_stage": stage, "success": True}
            self._record("terminal_response", message.request_id, metadata)
            if entry.live:
                entry.delivery.put(DeliveredChunk(stage, message.data, whole=True))

    def _next_sends(self, entry: _Request, message: Result) -> Sends:
        """The messages to the next stages after a result."""
        sends = entry.flow.finished(message.stage, message.data)
        metadata: dict[str, Any] = {"terminal": message.stage in entry.flow.results}
        if following := list(dict.fromkeys(stage for stage, _ in sends)):
            metadata["next"] = following
        self._recorder.record("stage_complete", message.request_id, message.stage, metadata)
        return sends

    def _on_failure(self, entry: _Request, message: StageFailure) -> None:
        metadata = {"from_stage": message.stage, "success": False}
        self._record("terminal_response", message.request_id, metadata)
        if message.kind == "dropped":
            self._end_early(entry, RequestState.ABORTED, RequestAborted())
        else:
            status = 400 if message.kind == "caller" else 500
            self._end_early(entry, RequestState.FAILED, RequestFailed(message.error, status))

    def _on_stage_ended(self, stage: str, error: str) -> None:
        reason = error or "it was shut down"
        self._ready.pop(stage, None)
        self._stats.pop(stage, None)
        if self.running:
            self._down[stage] = reason
        for entry in list(self._requests.values()):
            if entry.live and entry.flow.is_pending(stage):
                failure = RequestFailed(f"stage {stage} ended: {reason}", 500)
                self._end_early(entry, RequestState.FAILED, failure)
        self._operations.stage_ended(stage, reason)

    # State changes of a request

    def _live(self, request_id: str) -> _Request | None:
        entry = self._requests.get(request_id)
        return entry if entry is not None and entry.live else None

    def _advance(self, entry: _Request, step: Any) -> None:
        """Run one step of the flow and send its messages; an error ends this request only."""
        try:
            sends: Sends = step()
            for stage, message in sends:
                self._send(stage, message)
            if entry.ends_early:
                self._send_end(entry, [stage for stage, _ in sends])
            if entry.flow.done:
                self._complete(entry)
        except StageUnavailable as error:
            self._end_early(entry, RequestState.FAILED, RequestFailed(str(error), 503))
        except FlowError as error:
            self._end_early(entry, RequestState.FAILED, RequestFailed(str(error), 500))
        except Exception as error:  # routes and merges are user code
            log.exception("request_routing_failed request=%s", entry.flow.request_id)
            reason = f"{type(error).__name__}: {error}"
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

    def _end_slow_reader(self, request_id: str, error: RequestFailed) -> None:
        if entry := self._live(request_id):
            self._end_early(entry, RequestState.FAILED, error)
        elif ended_entry := self._requests.get(request_id):
            # The reader has not taken the end yet: replace it, and drop the chunks before it.
            ended_entry.delivery.end = error

    def _send(self, stage: str, message: StageInput) -> None:
        if stage in self._down and not isinstance(message, Abort | ProfilerStart | ProfilerStop):
            raise StageUnavailable(
                f"stage {stage} is not running ({self._down[stage]}); try again later"
            )
        if isinstance(message, Submit) and message.from_stage:
            to = {"to_stage": stage, "transport": "coordinator"}
            request_id = message.payload.request_id
            self._recorder.record("stage_hop_sent", request_id, message.from_stage, to)
        self._transport.send(stage, message)

    def _record(self, event: str, request_id: str, metadata: dict[str, Any]) -> None:
        self._recorder.record(event, request_id, "coordinator", metadata)

    def _broadcast(self, message: StageInput) -> None:
        for stage in self.plan.stages:
            try:
                self._transport.send(stage, message)
            except StageUnavailable:
                continue  # a stage that is down holds no requests

    # Status and operations

    def health(self) -> dict[str, Any]:
        """The body of GET /health (note:api-server 1.1); `failed_stages` only if there are any."""
        if not self.running or self._down:
            status = "unhealthy"
        else:
            status = "healthy" if self._was_ready else "starting"
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
        """The latest gauges of each stage that has reported any."""
        return {stage: dict(values) for stage, values in self._stats.items()}

    def stage_info(self) -> dict[str, dict[str, Any]]:
        """The static information of each ready stage."""
        return dict(self._ready)

    async def admin(
        self,
        action: str,
        payload: dict[str, Any],
        stages: list[str] | None = None,
        timeout_s: float | None = None,
    ) -> Aggregate:
        """Run one operation on the stages and return the aggregate of note:api-server 2.2.

        Raises RequestFailed: 400 for an unknown stage, 503 when stopped, 504 on timeout.
        """
        if not self.running:
            raise RequestFailed(NOT_RUNNING, 503)
        chosen = self._operations.select_stages(stages, self.plan)
        is_all_stages = set(chosen) == set(self.plan.stages)
        is_abort = action == "pause_generation" and payload.get("mode", "abort") == "abort"
        requests_before = list(self._requests.values())
        try:
            operation = Admin("", action, payload, timeout_s)
            return await self._operations.run(operation, chosen, self._ready)
        finally:
            if is_all_stages and is_abort:
                for entry in requests_before:
                    if entry.live:
                        self._end_early(entry, RequestState.ABORTED, RequestAborted())

    def profiler_start(self, start: ProfilerStart) -> None:
        """Start recording at every stage; stages do not reply (note:api-server 4)."""
        self.profiling_run_id = start.run_id
        if start.event_dir:
            self._recorder.start(start.run_id, start.event_dir)
        self._broadcast(start)

    def profiler_stop(self, run_id: str | None = None) -> str | None:
        """Stop recording at every stage; returns the given id, else the active one."""
        active = self.profiling_run_id
        if run_id is None or run_id == active:
            self.profiling_run_id = None
        self._recorder.stop(run_id)
        self._broadcast(ProfilerStop(run_id))
        return run_id or active

    def stop(self) -> None:
        """Fail all live requests and refuse new ones."""
        self.running = False
        for entry in list(self._requests.values()):
            if entry.live:
                self._end_early(entry, RequestState.FAILED, RequestFailed(NOT_RUNNING, 503))
        self._operations.stop(NOT_RUNNING)
        self._recorder.stop()
