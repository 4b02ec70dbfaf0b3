"""Messages between the coordinator and its stages, in one process or over a socket.

Invariant: every message can be encoded as msgpack (tuples are decoded as lists); audio is raw
little-endian float32 bytes. A message is never changed after it was sent: threads share its dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

FailureKind = Literal["caller", "server", "dropped"]


class OmniRequest(Struct, frozen=True):
    """One request, the same for every stage; `metadata["task"]` chose the entry stage."""

    inputs: Any
    params: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


class StagePayload(Struct, frozen=True):
    """The input of one stage: the entry stage gets `{"raw_inputs": inputs}` as `data`."""

    request_id: str
    request: OmniRequest
    data: Any


class Submit(Struct, frozen=True, tag="submit"):
    """A request for a stage; `from_stage` is "" if it comes from the client.

    `fed`: the previous stage streams into this one; `StreamChunk`s follow, the last one marked.
    """

    payload: StagePayload
    from_stage: str = ""
    fed: bool = False


class StreamChunk(Struct, frozen=True, tag="stream_chunk"):
    """A chunk of another stage's output while it is generated; `last` marks the last one.

    The texts of all chunks together are the complete text: the last one has the part that was not
    streamed.
    """

    request_id: str
    from_stage: str
    chunk: dict[str, Any]
    chunk_id: int = 0
    last: bool = False


class Abort(Struct, frozen=True, tag="abort"):
    """Drop a request, if the stage has it; the stage does not reply."""

    request_id: str


class EndEarly(Struct, frozen=True, tag="end_early"):
    """End a request with its partial result, which the stage sends immediately.

    Only for stages whose `StageReady.info` has `ends_early`; an unknown request is ignored.
    """

    request_id: str


class Admin(Struct, frozen=True, tag="admin"):
    """An operation on the stage, whose reply is one `AdminResult` with the same `op_id`."""

    op_id: str
    action: str
    payload: dict[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


class ProfilerStart(Struct, frozen=True, tag="profiler_start"):
    """Start recording; there is no reply (note:api-server 4)."""

    run_id: str
    trace_path_template: str = ""
    event_dir: str | None = None
    enable_torch: bool = True


class ProfilerStop(Struct, frozen=True, tag="profiler_stop"):
    """Stop recording that run; without an id, the active one."""

    run_id: str | None = None


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """The stage returns from `run` soon; its remaining requests get no result."""


class Result(Struct, frozen=True, tag="result"):
    """A stage has finished a request; text in it is the complete text."""

    request_id: str
    stage: str
    data: dict[str, Any]


class ResultChunk(Struct, frozen=True, tag="streamed"):
    """A part of a result that is still being generated; text in it is new text only."""

    request_id: str
    stage: str
    chunk: dict[str, Any]
    chunk_id: int = 0
    modality: str = "text"


class StageFailure(Struct, frozen=True, tag="failed"):
    """A stage failed a request; `kind` is the cause: caller (400), server (500) or dropped.

    A request is dropped by an admin operation.
    """

    request_id: str
    stage: str
    error: str
    kind: FailureKind = "server"


class AdminResult(Struct, frozen=True, tag="admin_result"):
    """One stage's result of one operation (note:api-server 2.2)."""

    op_id: str
    stage: str
    action: str
    success: bool
    message: str
    data: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    rank: int | None = None
    role: Literal["single", "leader", "follower"] = "single"


class StageReady(Struct, frozen=True, tag="stage_ready"):
    """The stage has loaded and accepts requests; sent by the stage runner."""

    stage: str
    info: dict[str, Any] = field(default_factory=dict)


class StageEnded(Struct, frozen=True, tag="stage_ended"):
    """The stage accepts no more requests: it failed to start, crashed, or was shut down.

    `error` is the reason, "" after a shutdown.
    """

    stage: str
    error: str = ""


class StageStats(Struct, frozen=True, tag="stage_stats"):
    """Current gauges of a stage; each message replaces the previous one."""

    stage: str
    values: dict[str, float]


StageInput: TypeAlias = (
    Submit | StreamChunk | Abort | EndEarly | Admin | ProfilerStart | ProfilerStop | Shutdown
)
StageOutput: TypeAlias = (
    Result | ResultChunk | StageFailure | AdminResult | StageReady | StageEnded | StageStats
)
Emit: TypeAlias = Callable[[StageOutput], None]
