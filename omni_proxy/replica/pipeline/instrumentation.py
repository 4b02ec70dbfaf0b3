"""Records events of requests, a JSON line each, and torch traces, while a profiling run is active.

Contract (note:api-server 4.2): the file is `<event_dir>/events_<owner>_<pid>.jsonl`, appended line
by line. `record` costs one comparison when idle, never raises, and counts the events that it drops.
Any thread may call any method of a recorder. A process has one torch trace at a time, since two
open profilers would crash it; a trace that fails is logged and has no other effect. A stage's inbox
and outlet record its events. Invariant: both pass on all messages in the same order, except those
of the profiler, which are handled in the stage's thread, where a torch trace must begin and end.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

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

if TYPE_CHECKING:
    _Queue = queue.SimpleQueue[StageInput]
else:
    _Queue = queue.SimpleQueue

log = logging.getLogger(__name__)
_trace_lock = threading.Lock()  # held while a stage of this process records a trace


class EventRecorder:
    """One file of events: the coordinator's, or those of the stages of one process."""

    def __init__(self, owner: str = "") -> None:
        self.dropped = 0
        self.run_id: str | None = None
        self._owner = owner
        self._file: IO[str] | None = None
        self._lock = threading.Lock()

    def start(self, run_id: str, event_dir: str, stage: str = "") -> None:
        """Begin a run; an active one ends first. Errors are only logged.

        The first `stage` that starts names the file.
        """
        with self._lock:
            if self.run_id == run_id and self._file is not None:
                return
            self._close()
            self._owner = self._owner or stage or "unknown"
            path = Path(event_dir) / f"events_{self._owner}_{os.getpid()}.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", buffering=1, encoding="utf-8")
            except OSError as error:
                log.error("profile_events_not_recorded run=%s error=%s", run_id, error)
                return
            self.run_id = run_id

    def stop(self, run_id: str | None = None) -> None:
        """End the active run; a `run_id` that is not the active run's is ignored."""
        with self._lock:
            if run_id is None or run_id == self.run_id:
                self._close()

    def record(
        self,
        event_name: str,
        request_id: str,
        stage: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one event with the wall clock's time in nanoseconds."""
        if self.run_id is None:
            return
        event = {
            "request_id": request_id,
            "stage": stage or self._owner or "unknown",
            "event_name": event_name,
            "timestamp_ns": time.time_ns(),
            "run_id": self.run_id,
            "pid": os.getpid(),
            "metadata": dict(metadata or {}),
        }
        try:
            line = json.dumps(event, default=to_json_value)
            with self._lock:
                if self._file is not None:
                    self._file.write(line + "\n")
        except (
            OSError,
            ValueError,
            RecursionError,
            TypeError,
        ):  # a full disk, a circular reference, an invalid key
            self.dropped += 1

    def _close(self) -> None:
        file, self._file, self.run_id = self._file, None, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.error("profile_events_file_close_failed error=%s", error)


def to_json_value(value: object) -> object:
    """Convert a value that JSON cannot represent: a tensor to a summary, others to their repr."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return repr(value)
    if len(shape) == 0:
        return value.item()  # type: ignore[attr-defined]
    return {
        "__tensor_summary__": True,
        "type": type(value).__name__,
        "shape": list(shape),
        "dtype": str(dtype),
        "device": str(getattr(value, "device", "cpu")),
    }


STAGE_EVENTS = EventRecorder()  # of all stages that run in this process


class TorchTrace:
    """The torch trace of a process, for one stage; start and stop it in that stage's thread."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._active: Any = None
        self._path = Path()
        self._run_id = ""

    def start(self, run_id: str, template: str) -> None:
        """Start; the path `template` may contain {run_id} and {stage} (note:api-server 4.1)."""
        self.stop(None)
        if not _trace_lock.acquire(blocking=False):
            return  # another stage of this process already records all threads
        path_prefix = template.replace("{run_id}", run_id).replace("{stage}", self._stage)
        self._path = Path(f"{path_prefix}_pid{os.getpid()}.json")
        try:
            from torch._C._profiler import _ExperimentalConfig
            from torch.profiler import ProfilerActivity, profile

            self._active = profile(
                activities=[ProfilerActivity.CPU],
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self._active.__enter__()
            self._run_id = run_id
        except (ImportError, RuntimeError) as error:
            self._active = None
            _trace_lock.release()
            log.error("torch_trace_failed stage=%s error=%s", self._stage, error)

    def stop(self, run_id: str | None) -> None:
        if self._active is None or run_id not in (None, self._run_id):
            return
        active, self._active = self._active, None
        try:
            active.__exit__(None, None, None)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            active.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            log.error("torch_trace_not_written stage=%s error=%s", self._stage, error)
        finally:
            _trace_lock.release()


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
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
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
