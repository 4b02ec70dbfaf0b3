"""What travels between the coordinator and its stages, in one process or over a socket.

Invariant: every message survives msgpack and back (tuples come back as lists); audio is raw
little-endian float32 bytes. A message once sent is never changed: threads share its dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

FailureKind = Literal["caller", "server", "dropped"]


class OmniRequest(Struct, frozen=True):
    """One request as every stage sees it; `metadata["task"]` chose the entry stage."""

    inputs: Any
    params: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


class StagePayload(Struct, frozen=True):
    """What one stage works on: the entry stage gets `{"raw_inputs": inputs}` as `data`."""

    request_id: str
    request: OmniRequest
    data: Any


class Submit(Struct, frozen=True, tag="submit"):
    """Work for a stage; `from_stage` is "" where it comes from the caller.

    `fed`: the stage before streams into this one: `StreamChunk`s follow, the last one marked.
    """

    payload: StagePayload
    from_stage: str = ""
    fed: bool = False


class StreamChunk(Struct, frozen=True, tag="stream_chunk"):
    """One piece of another stage's output while it is made; `last` says that no more come.

    The texts of all chunks together are the whole text: the last one holds what was not streamed.
    """

    request_id: str
    from_stage: str
    chunk: dict[str, Any]
    chunk_id: int = 0
    last: bool = False


class Abort(Struct, frozen=True, tag="abort"):
    """Forget a request, known or not; nothing is answered."""

    request_id: str


class Admin(Struct, frozen=True, tag="admin"):
    """An operation on the stage itself, answered by one `AdminResult` with the same `op_id`."""

    op_id: str
    action: str
    payload: dict[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


class ProfilerStart(Struct, frozen=True, tag="profiler_start"):
    """Begin to record; never answered (api-server.md 4)."""

    run_id: str
    trace_path_template: str = ""
    event_dir: str | None = None
    enable_torch: bool = True


class ProfilerStop(Struct, frozen=True, tag="profiler_stop"):
    """Stop recording that run; without an id, whichever is active."""

    run_id: str | None = None


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """The stage returns from `run` soon; what it still holds gets no answer."""


class Result(Struct, frozen=True, tag="result"):
    """A stage is done with a request; text in it is the whole text."""

    request_id: str
    stage: str
    data: dict[str, Any]


class ResultChunk(Struct, frozen=True, tag="streamed"):
    """A piece of a result that is still being made; text in it is new text only."""

    request_id: str
    stage: str
    chunk: dict[str, Any]
    chunk_id: int = 0
    modality: str = "text"


class StageFailure(Struct, frozen=True, tag="failed"):
    """A stage gave a request up: the caller's fault (400), ours (500), or an admin's wish."""

    request_id: str
    stage: str
    error: str
    kind: FailureKind = "server"


class AdminResult(Struct, frozen=True, tag="admin_result"):
    """One stage's answer to one operation (api-server.md 2.2)."""

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
    """The stage has loaded what it needs and takes work; sent by the stage's shell."""

    stage: str
    info: dict[str, Any] = field(default_factory=dict)


class StageEnded(Struct, frozen=True, tag="stage_ended"):
    """The stage takes no more work: it could not start, broke, or was shut down (`error` "")."""

    stage: str
    error: str = ""


class StageStats(Struct, frozen=True, tag="stage_stats"):
    """Gauges of a stage as of now; each message replaces the one before."""

    stage: str
    values: dict[str, float]


StageInput: TypeAlias = (
    Submit | StreamChunk | Abort | Admin | ProfilerStart | ProfilerStop | Shutdown
)
StageOutput: TypeAlias = (
    Result | ResultChunk | StageFailure | AdminResult | StageReady | StageEnded | StageStats
)
Emit: TypeAlias = Callable[[StageOutput], None]
