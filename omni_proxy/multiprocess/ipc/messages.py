"""The messages between the main process and a data-plane process.

The main process sends `ProcessCommand`s, a data-plane process `ProcessEvent`s, both as MessagePack
over a `channel.IpcChannel`. Both sides are the same build, so the format has no version.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, TypeAlias

from msgspec import Struct

from omni_proxy.admin_ops.abort_requests import AbortFindings, AbortTarget
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.fleet.worker import WorkerState
from omni_proxy.telemetry.histogram import Noted
from omni_proxy.telemetry.recent_window import FinishedExchange


class StartCommand(Struct, frozen=True, tag=True):
    """The first command; the descriptors of shared counters, sessions and keys are attached.

    `silent_secs`: time without a message after which /ready of the process fails. `tree_seed`: seed
    of the hashes in prefix trees.
    """

    index: int
    admin_socket: str
    silent_secs: float
    proxy_id: str = ""
    tree_seed: int = 0


class VoiceListMessage(Struct, frozen=True):
    """The registry of uploaded voices; `names` is None while they are unknown."""

    owner: str
    names: tuple[str, ...] | None


class CallersMessage(Struct, frozen=True):
    """The resolved keys of callers, with the slot of each. `highest`: index of the last counter
    row."""

    entries: tuple[CallerKey, ...] = ()
    slots: tuple[int, ...] = ()
    highest: int = 0


class StateSnapshot(Struct, frozen=True, tag=True):
    """The fleet and the configuration at one moment; None for a part that has not changed.

    `processes`: the highest process index in use. `voice_changes`: number of this process's
    VoicesChangedEvents that `voices` includes.
    """

    revision: int
    rows: tuple[WorkerState, ...] | None
    config: Config | None
    voices: VoiceListMessage
    voice_changes: int
    processes: int
    callers: CallersMessage | None = None


class ListenCommand(Struct, frozen=True, tag=True):
    """Accept only on the sockets whose descriptors are attached."""

    count: int


class ClearCacheCommand(Struct, frozen=True, tag=True):
    """Forget what the prefix trees have of this worker, whose cache was cleared."""

    serial: int


class LoadRow(Struct, frozen=True, array_like=True):
    """A load report of an engine, as in `wire.load_report`; `at`: the time of its arrival, by the
    clock that all processes share."""

    serial: int
    waiting: float | None
    kv_usage: float | None
    at: float


class EngineLoadsCommand(Struct, frozen=True, tag=True):
    """Load reports of engines."""

    rows: list[LoadRow]


class EngineLoadsEvent(Struct, frozen=True, tag=True):
    """Load reports that this process received in responses."""

    rows: list[LoadRow]


class KvChangesCommand(Struct, frozen=True, tag=True):
    """Changes of the KV cache of a worker or rank, from its KV events; `holder`: its URL."""

    holder: str
    changes: list[tuple[int, bytes]]


class ClusterHintsCommand(Struct, frozen=True, tag=True):
    """Prompt prefixes that another process or proxy has sent to a worker: packed hashes by
    `target_key`."""

    prefixes: dict[int, bytes]


class ClusterHintsEvent(Struct, frozen=True, tag=True):
    """Prompt prefixes that this process has sent, as in ClusterHintsCommand, and sessions that it
    has placed: `target_key` by digest."""

    prefixes: dict[int, bytes]
    sessions: dict[bytes, int]


class SaveTreesCommand(Struct, frozen=True, tag=True):
    """Write the prefix trees to the attached file."""


class LoadTreesCommand(Struct, frozen=True, tag=True):
    """Replace the prefix trees with those of the attached file."""


class AbortCommand(Struct, frozen=True, tag=True):
    """Abort the matching requests that wait in the queue, and report the workers of the running
    ones (AbortedEvent)."""

    number: int
    target: AbortTarget


class DrainCommand(Struct, frozen=True, tag=True):
    """Accept no new connection; exit after the last one has ended. `keeps_idle`: see
    `DataPlane.begin_drain`."""

    keeps_idle: bool = False


ProcessCommand: TypeAlias = (
    StartCommand
    | StateSnapshot
    | ListenCommand
    | ClearCacheCommand
    | EngineLoadsCommand
    | KvChangesCommand
    | ClusterHintsCommand
    | SaveTreesCommand
    | LoadTreesCommand
    | AbortCommand
    | DrainCommand
)


class AckEvent(Struct, frozen=True, tag=True):
    """`count` commands have taken effect; `revision` is that of the newest StateSnapshot."""

    count: int
    revision: int


class ListenFailedEvent(Struct, frozen=True, tag=True):
    """The process could not receive the sockets of a ListenCommand, and keeps its current ones."""

    error: str


class RequestFailedEvent(Struct, frozen=True, tag=True):
    """A request failed in a way that counts against its worker's health."""

    serial: int
    status: int | None
    error: str
    at: datetime
    half_open_id: int


class RequestSucceededEvent(Struct, frozen=True, tag=True):
    """The first success after failures, which resets the worker's failure count."""

    serial: int
    half_open_id: int


class HalfOpenStartedEvent(Struct, frozen=True, tag=True):
    """The process sends the single request to a half-open worker; `half_open_id`: its number."""

    serial: int
    half_open_id: int


class HalfOpenEndedEvent(Struct, frozen=True, tag=True):
    """The request of a HalfOpenStartedEvent has ended."""

    serial: int
    half_open_id: int


class VoicesChangedEvent(Struct, frozen=True, tag=True):
    """A worker accepted an upload or a deletion of a voice."""

    serial: int


class AbortedEvent(Struct, frozen=True, tag=True):
    """The result of the AbortCommand with this number; sent before its acknowledgement."""

    number: int
    findings: AbortFindings


class LogLinesEvent(Struct, frozen=True, tag=True):
    """Lines for the access log, the route log and the span exporter; `dropped`: for each of them,
    the number of lines that did not fit into its buffer."""

    access: list[bytes]
    route: list[bytes]
    spans: list[bytes]
    dropped: tuple[int, int, int]


class HistogramDelta(Struct, frozen=True, array_like=True):
    """New values of a histogram: the counts of its buckets, by index, and their sum."""

    bucket_counts: dict[int, int]
    sum: float


class EndsDelta(Struct, frozen=True, array_like=True):
    """New ends of one `telemetry.metrics.EndKey` in a series."""

    model: str | None
    status_class: int
    outcome: str
    count: int


class TokensDelta(Struct, frozen=True, array_like=True):
    """New tokens in a series; `kind` is that of `response_usage.tokens_in`."""

    model: str | None
    kind: str
    count: int


class SeriesDelta(Struct, frozen=True, array_like=True):
    """New values of one `telemetry.metrics.RouteSeries`; serial 0: no worker.

    `sums`: in the order of `metrics_delta.SUMS`.
    """

    route: str
    serial: int
    ends: list[EndsDelta]
    total: HistogramDelta
    first: HistogramDelta
    between: HistogramDelta
    sums: tuple[int, ...]
    tokens: list[TokensDelta]


class WindowDelta(Struct, frozen=True, array_like=True):
    """New values of one second of the recent window; serial -1: for the whole process."""

    serial: int
    requests: int
    errors: int
    firsts: dict[int, int]


class RecentEndDelta(Struct, frozen=True, array_like=True):
    """A recently ended exchange; `failed`: it belongs to the failed ones of the window."""

    failed: bool
    end: FinishedExchange


class FailedAttemptsDelta(Struct, frozen=True, array_like=True):
    """Attempts that failed at a worker."""

    serial: int
    cause: str
    count: int


class AliasTargetDelta(Struct, frozen=True, array_like=True):
    """Requests for an alias that went to this target."""

    alias: str
    target: str
    count: int


class CachedTokensDelta(Struct, frozen=True, array_like=True):
    """Prompt tokens that were predicted to be cached at a worker, and that it reported."""

    serial: int
    predicted: int
    reported: int


class WorkerCountsDelta(Struct, frozen=True, array_like=True):
    """Requests of one kind of traffic at a worker."""

    serial: int
    traffic: str
    routed: int
    succeeded: int
    failed: int


class ExemplarDelta(Struct, frozen=True, array_like=True):
    """An exemplar of a series; serial 0: no worker. `kind`: which of its histograms."""

    route: str
    serial: int
    kind: int
    exemplar: Noted


class MetricsEvent(Struct, frozen=True, tag=True):
    """All metrics counted since the last MetricsEvent. `phases`: for each route the histograms in
    the order of `metrics_delta.PHASES`."""

    series: list[SeriesDelta]
    phases: dict[str, list[HistogramDelta]]
    seconds: list[WindowDelta]
    ends: list[RecentEndDelta]
    failed_attempts: list[FailedAttemptsDelta]
    retries: int
    alias_targets: list[AliasTargetDelta]
    legs: dict[str, HistogramDelta]
    transfer_failures: int
    fallbacks: dict[str, int]
    cached_tokens: list[CachedTokensDelta]
    worker_counts: list[WorkerCountsDelta]
    exemplars: list[ExemplarDelta]


class ProcessStats(Struct, frozen=True, tag=True):
    """The row of a process in GET /status; `counts` never decrease while the process lives."""

    counts: dict[str, int]
    ended: dict[str, int]
    connections: int
    waiting: int
    held_bytes: int
    phases: dict[str, int]
    oldest: list[dict[str, Any]]
    policy: dict[str, Any]
    lag_ms: float
    longest_turn_ms: float
    pool_policies: dict[str, dict[str, Any]] = {}


ProcessEvent: TypeAlias = (
    AckEvent
    | ListenFailedEvent
    | RequestFailedEvent
    | RequestSucceededEvent
    | HalfOpenStartedEvent
    | HalfOpenEndedEvent
    | VoicesChangedEvent
    | AbortedEvent
    | EngineLoadsEvent
    | ClusterHintsEvent
    | LogLinesEvent
    | MetricsEvent
    | ProcessStats
)

# Events after which no snapshot has to be published.
UNCHANGING: Final = (
    AckEvent,
    LogLinesEvent,
    ProcessStats,
    MetricsEvent,
    AbortedEvent,
    EngineLoadsEvent,
    ClusterHintsEvent,
)
