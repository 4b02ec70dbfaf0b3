"""A stage's inbox and outlet, which record its events and handle the messages of the profiler.

Invariant: both pass on all messages in the same order, except those of the profiler, which are
handled in the stage's thread, where a torch trace must begin and end.
"""

from __future__ import annotations

import queue
from time import monotonic
from typing import TYPE_CHECKING, Self

from omni_proxy.replica.pipeline.stage_messages import (
    Emit,
    ProfilerStart,
    ProfilerStop,
    ResultChunk,
    StageFailure,
    StageInput,
    StageOutput,
    StreamChunk,
    Submit,
)
from omni_proxy.replica.profiling.recorder import STAGE_EVENTS, TorchTrace

if TYPE_CHECKING:
    _Queue = queue.SimpleQueue[StageInput]
else:
    _Queue = queue.SimpleQueue


class InstrumentedInbox(_Queue):
    """The queue that a stage's scheduler reads from."""

    # A built-in type gets its arguments in __new__, too.
    def __new__(cls, stage: str) -> Self:
        return super().__new__(cls)

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage
        self._trace = TorchTrace(stage)

    def get(self, block: bool = True, timeout: float | None = None) -> StageInput:
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            remaining = None if deadline is None else max(0.0, deadline - monotonic())
            message = super().get(block, remaining)
            if not self._record_or_handle(message):
                return message

    def get_nowait(self) -> StageInput:
        return self.get(block=False)

    def _record_or_handle(self, message: StageInput) -> bool:
        match message:
            case Submit(payload, from_stage):
                kind = "payload" if from_stage else "submit"
                metadata = {"from_stage": from_stage or "coordinator", "kind": kind}
                STAGE_EVENTS.record(
                    "stage_input_received", payload.request_id, self._stage, metadata
                )
            case StreamChunk(request_id, from_stage, _, chunk_id):
                chunk_metadata = {
                    "from_stage": from_stage,
                    "chunk_id": chunk_id,
                    "modality": "text",
                }
                STAGE_EVENTS.record(
                    "stage_stream_chunk_received", request_id, self._stage, chunk_metadata
                )
            case ProfilerStart(run_id, template, event_dir, enable_torch):
                if event_dir:
                    STAGE_EVENTS.start(run_id, event_dir, self._stage)
                if enable_torch and template:
                    self._trace.start(run_id, template)
                return True
            case ProfilerStop(run_id):
                self._trace.stop(run_id)
                STAGE_EVENTS.stop(run_id)
                return True
        return False


class InstrumentedEmit:
    """Calls `emit` for each message, and records the first chunk, all chunks, and a failure."""

    def __init__(self, stage: str, emit: Emit) -> None:
        self._stage = stage
        self._emit = emit

    def __call__(self, message: StageOutput) -> None:
        if STAGE_EVENTS.run_id is not None:
            self._record(message)
        self._emit(message)

    def _record(self, message: StageOutput) -> None:
        match message:
            case ResultChunk(request_id, _, _, chunk_id, modality):
                metadata = {"to_stage": "coordinator", "chunk_id": chunk_id, "modality": modality}
                if chunk_id == 0:
                    STAGE_EVENTS.record(
                        "stage_first_stream_chunk_sent", request_id, self._stage, metadata
                    )
                STAGE_EVENTS.record("stage_stream_chunk_sent", request_id, self._stage, metadata)
            case StageFailure(request_id, _, error):
                # A success is recorded by the coordinator, which determines the next stage.
                failure_metadata = {"terminal": True, "error": error}
                STAGE_EVENTS.record("stage_complete", request_id, self._stage, failure_metadata)
