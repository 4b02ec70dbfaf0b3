"""One request on its way through the stages: what was sent where, and what is still owed.

    enter(stage) ──chunks──> its stream_to ──result──> terminal result, next stages
Done when no stage owes a result. Pure: events in, messages out; nothing is sent from here.
Invariant: a stage is entered once per request; a result that nobody owes is ignored.
"""

from __future__ import annotations

from typing import Any

from omni_proxy.replica.pipeline.coordination.chunks import StreamedLengths
from omni_proxy.replica.pipeline.messages import (
    OmniRequest,
    ResultChunk,
    StageInput,
    StagePayload,
    StreamChunk,
    Submit,
)
from omni_proxy.replica.pipeline.plan import FlowError, Plan

Sends = list[tuple[str, StageInput]]


class RequestFlow:
    """Raises FlowError, or whatever a route or a merge raises, out of every method."""

    def __init__(self, plan: Plan, request_id: str, request: OmniRequest) -> None:
        self.request_id = request_id
        self.request = request
        self.results: dict[str, dict[str, Any]] = {}
        self._plan = plan
        self._entered: set[str] = set()
        self._owing: set[str] = set()
        self._live: dict[str, tuple[str, ...]] = {}
        self._sent: dict[str, StreamedLengths] = {}
        self._waiting: dict[str, dict[str, Any]] = {}

    @property
    def done(self) -> bool:
        return bool(self._entered) and not self._owing

    def owes(self, stage: str) -> bool:
        return stage in self._owing

    def begin(self) -> Sends:
        sends: Sends = []
        entry = self._plan.entry_for(self.request)
        self._enter(entry, {"raw_inputs": self.request.inputs}, "", sends)
        return sends

    def streamed(self, message: ResultChunk) -> Sends:
        """Pass a piece on to the stages that are fed by this one."""
        stage = message.stage
        if not (live := self._live.get(stage)):
            return []
        self._sent[stage].note(message.chunk)
        chunk = StreamChunk(self.request_id, stage, message.chunk, message.chunk_id)
        return [(target, chunk) for target in live]

    def finished(self, stage: str, data: dict[str, Any]) -> Sends:
        """Take a stage's result: keep it where it is terminal, go on to the next stages."""
        if stage not in self._owing:
            return []
        sends: Sends = []
        planned = self._plan.stages[stage]
        live = self._live.get(stage, ())
        if live:
            rest = self._sent[stage].rest(data)
            last = StreamChunk(self.request_id, stage, rest, last=True)
            sends += [(target, last) for target in live]
        chosen: tuple[str, ...] = ()
        if planned.config.targets:
            chosen = planned.chosen(StagePayload(self.request_id, self.request, data))
        onward = [target for target in chosen if target not in live]
        # A route that sends a result on says that it is not the answer yet.
        if planned.config.terminal and not (planned.route and onward):
            self.results[stage] = data
        for target in onward:
            self._arrive(target, stage, data, sends)
        self._owing.remove(stage)
        self._check_end()
        return sends

    def _arrive(self, target: str, stage: str, data: dict[str, Any], sends: Sends) -> None:
        planned = self._plan.stages[target]
        if planned.merge is None:
            self._enter(target, data, stage, sends)
            return
        came = self._waiting.setdefault(target, {})
        came[stage] = data
        if came.keys() >= set(planned.config.wait_for):
            del self._waiting[target]
            self._enter(target, planned.merge(came), stage, sends)

    def _enter(
        self, stage: str, data: Any, came_from: str, sends: Sends, fed: bool = False
    ) -> None:
        if stage in self._entered:
            raise FlowError(
                f"stage {stage} was reached twice (again from {came_from}); if it shall join "
                "them, give it wait_for and merge"
            )
        self._entered.add(stage)
        self._owing.add(stage)
        payload = StagePayload(self.request_id, self.request, data)
        sends.append((stage, Submit(payload, came_from, fed)))
        planned = self._plan.stages[stage]
        if planned.config.stream_to:
            chosen = planned.chosen(payload)
            live = tuple(t for t in planned.config.stream_to if t in chosen)
            self._live[stage] = live
            self._sent[stage] = StreamedLengths()
            for target in live:
                self._enter(target, {}, stage, sends, fed=True)

    def _check_end(self) -> None:
        if self._owing:
            return
        for target, came in self._waiting.items():
            lacking = set(self._plan.stages[target].config.wait_for) - came.keys()
            raise FlowError(f"stage {target} waited in vain for {', '.join(sorted(lacking))}")
        if not self.results:
            raise FlowError("no terminal stage was reached")
