"""The flow of one request through the stages: which were entered, which results are pending.

    enter(stage) ──chunks──> its stream_to ──result──> terminal result, next stages
Done when no stage's result is pending. Pure: takes events, returns messages; sends nothing.
Invariant: a stage is entered once per request; a result of a stage that is not pending is ignored.
"""

from __future__ import annotations

from typing import Any

from omni_proxy.replica.pipeline.config import FlowError, Plan
from omni_proxy.replica.pipeline.coordination.delivery import StreamedLengths
from omni_proxy.replica.pipeline.stage_messages import (
    OmniRequest,
    ResultChunk,
    StageInput,
    StagePayload,
    StreamChunk,
    Submit,
)

Sends = list[tuple[str, StageInput]]


class RequestFlow:
    """The flow of one request. Every method raises FlowError, or what a route or a merge raises."""

    def __init__(self, plan: Plan, request_id: str, request: OmniRequest) -> None:
        self.request_id = request_id
        self.request = request
        self.results: dict[str, dict[str, Any]] = {}
        self._plan = plan
        self._entered: set[str] = set()
        self._pending: set[str] = set()
        self._streaming_to: dict[str, tuple[str, ...]] = {}
        self._streamed_lengths: dict[str, StreamedLengths] = {}
        self._joins: dict[str, dict[str, Any]] = {}

    @property
    def done(self) -> bool:
        return bool(self._entered) and not self._pending

    def is_pending(self, stage: str) -> bool:
        return stage in self._pending

    def begin(self) -> Sends:
        sends: Sends = []
        entry = self._plan.entry_for(self.request)
        self._enter(entry, {"raw_inputs": self.request.inputs}, "", sends)
        return sends

    def streamed(self, message: ResultChunk) -> Sends:
        """Pass a chunk on to the stages that this one streams into."""
        stage = message.stage
        if not (streaming_to := self._streaming_to.get(stage)):
            return []
        self._streamed_lengths[stage].add(message.chunk)
        chunk = StreamChunk(self.request_id, stage, message.chunk, message.chunk_id)
        return [(target, chunk) for target in streaming_to]

    def finished(self, stage: str, data: dict[str, Any]) -> Sends:
        """Handle a stage's result: keep it if terminal, send it to the next stages."""
        if stage not in self._pending:
            return []
        sends: Sends = []
        planned = self._plan.stages[stage]
        streaming_to = self._streaming_to.get(stage, ())
        if streaming_to:
            remaining = self._streamed_lengths[stage].remaining(data)
            last = StreamChunk(self.request_id, stage, remaining, last=True)
            sends += [(target, last) for target in streaming_to]
        chosen: tuple[str, ...] = ()
        if planned.config.targets:
            chosen = planned.choose_next(StagePayload(self.request_id, self.request, data))
        onward = [target for target in chosen if target not in streaming_to]
        # A route that sends a result on marks it as not final.
        if planned.config.terminal and not (planned.route and onward):
            self.results[stage] = data
        for target in onward:
            self._deliver(target, stage, data, sends)
        self._pending.remove(stage)
        self._check_end()
        return sends

    def _deliver(self, target: str, stage: str, data: dict[str, Any], sends: Sends) -> None:
        planned = self._plan.stages[target]
        if planned.merge is None:
            self._enter(target, data, stage, sends)
            return
        arrived = self._joins.setdefault(target, {})
        arrived[stage] = data
        if arrived.keys() >= set(planned.config.wait_for):
            del self._joins[target]
            self._enter(target, planned.merge(arrived), stage, sends)

    def _enter(
        self, stage: str, data: Any, from_stage: str, sends: Sends, fed: bool = False
    ) -> None:
        if stage in self._entered:
            raise FlowError(
                f"stage {stage} was reached twice (again from {from_stage}); to join "
                "both inputs, give it wait_for and merge"
            )
        self._entered.add(stage)
        self._pending.add(stage)
        payload = StagePayload(self.request_id, self.request, data)
        sends.append((stage, Submit(payload, from_stage, fed)))
        planned = self._plan.stages[stage]
        if planned.config.stream_to:
            chosen = planned.choose_next(payload)
            live = tuple(t for t in planned.config.stream_to if t in chosen)
            self._streaming_to[stage] = live
            self._streamed_lengths[stage] = StreamedLengths()
            for target in live:
                self._enter(target, {}, stage, sends, fed=True)

    def _check_end(self) -> None:
        if self._pending:
            return
        for target, arrived in self._joins.items():
            missing = set(self._plan.stages[target].config.wait_for) - arrived.keys()
            raise FlowError(f"stage {target} got no data from {', '.join(sorted(missing))}")
        if not self.results:
            raise FlowError("no terminal stage was reached")
