"""One request with its response as data: its state and its result; and the interfaces of what
observes it: log sinks, metrics and the recorder of gaps.

Invariant: nothing here does I/O, reads a clock, counts or logs. The event loop (fast path) and the
coroutine of the connection write the same object, one after the other; `finalize` reads it at the
end. An observer neither waits nor fails, and keeps no reference to an exchange. `Recorders` has the
current ones; a reload replaces them.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol, get_args

import msgspec

from omni_proxy.api_keys.caller_limits import ApiCaller
from omni_proxy.dataplane.exchange.request_trace import RequestTrace
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.weight_version import UNKNOWN_VERSION, WeightVersion
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.explanation import PickRecord
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import Route

# How an exchange ended; the values are those of the access log and of the metrics. "": it runs.
Outcome = Literal[
    "", "completed", "refused", "client_disconnected", "stream_cancelled", "client_stalled",
    "timed_out", "stream_error", "upstream_error", "cut_by_proxy",
]  # fmt: skip
OUTCOMES: Final[tuple[Outcome, ...]] = tuple(filter(None, get_args(Outcome)))
EndedBy = Literal["", "client", "proxy", "worker"]


class Exchange:
    """One exchange. Times are of the event loop's clock in seconds, 0.0 for a phase that was not
    reached."""

    __slots__ = (
        "admitted", "attempts", "body", "body_at", "bytes_in", "bytes_out", "caller",
        "candidates", "chunks", "client", "connect_secs", "cors", "ended_at", "ended_by",
        "error", "failed_attempts", "first_at", "half_open_id", "head_at", "held_bytes",
        "idempotency_key", "last_chunk", "last_rank", "last_worker", "legs", "longest_gap",
        "method", "outcome", "own_secs", "phase", "policy", "queued_secs", "rank",
        "relayed", "request_bucket", "request_id", "request_id_line", "requirements",
        "reserved", "response_head_at", "route", "sent_at", "single_chunk", "spare_leg",
        "started_at", "status", "stream", "target", "token_bucket", "trace", "weight_version",
        "worker", "worker_seen",
    )  # fmt: skip

    def __init__(self, started_at: float, client: str) -> None:
        self.started_at = started_at  # its first byte
        self.client = client  # address of the client
        self.head_at = 0.0
        self.body_at = 0.0
        self.sent_at = 0.0  # the request was sent to the worker
        self.response_head_at = 0.0  # the head of the response arrived
        self.first_at = 0.0  # the first chunk of its body arrived
        self.ended_at = 0.0
        self.queued_secs = 0.0
        self.connect_secs = 0.0  # of the last connection that had to be opened
        self.own_secs = 0.0  # time spent in the proxy until the request was sent
        self.longest_gap = 0.0  # seconds between two chunks of the response
        self.method = "-"  # until the head has been parsed
        self.target = "-"
        self.request_id = b""
        self.cors = b""  # header lines that let a page of another origin read the response
        self.request_id_line = b""  # the header line with the request id, if one is configured
        self.idempotency_key = False
        self.trace: RequestTrace | None = None  # if tracing is enabled
        self.route: Route | None = None
        self.requirements: Requirements | None = None
        self.policy = ""
        self.candidates: PickRecord | None = None  # of its first pick, if they were recorded
        self.caller: ApiCaller | None = None  # the owner of its key in [[keys]]
        self.reserved = -1  # tokens; these three are of `admission.caller_admission`
        self.request_bucket = self.token_bucket = 0
        self.body = b""  # of the request, as long as it may be sent again
        self.worker: Worker | None = None  # of the current attempt
        self.rank: DpRank | None = None  # of `worker`, if that has ranks
        self.legs: TwoLegs | None = None  # of the current attempt, at a decode worker
        # The prefill leg of the last request that used this object, for reuse.
        self.spare_leg: Exchange | None = None
        # Of the last attempt that has ended.
        self.last_worker: Worker | None = None
        self.last_rank: DpRank | None = None
        self.weight_version: WeightVersion = (
            UNKNOWN_VERSION  # of the worker at the start of the attempt
        )
        self.worker_seen: tuple[str, bool, bool] = ("", False, False)
        self.attempts = 0
        # Failed attempts: worker or rank, and the result.
        self.failed_attempts: list[tuple[Worker, str]] | None = None
        self.half_open_id = 0  # number of the current attempt as a half-open request, else 0
        self.last_chunk = b""  # of the response, if token counts are read from it
        self.admitted = False  # counted as in flight
        self.held_bytes = 0  # of its request, counted in `inflight.held_bytes`
        self.relayed = False  # bytes of a response were sent to the client
        # Sent immediately and only once; its response was relayed in one chunk.
        self.single_chunk = False
        self.stream = False
        self.status = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.chunks = 0  # chunks of the response
        self.outcome: Outcome = ""
        self.ended_by: EndedBy = ""
        self.error = ""
        self.phase = ""

    def recycle(self, now: float) -> None:
        """Reset it for the next request with the same head on the same connection. Only for an
        exchange that the fast path has completed: fields that the fast path never sets are not
        reset, nor fields of the head, nor fields that every request sets before they are read. Its
        result stays until the fast path sets the next one, or calls `reset_result`."""
        self.started_at = self.head_at = self.body_at = now
        self.sent_at = self.own_secs = 0.0
        self.attempts = 0
        self.candidates = None

    def reset_result(self) -> None:
        """Reset the result of the request before, as the coroutine continues a recycled one."""
        self.response_head_at = self.first_at = 0.0
        self.status = self.bytes_out = self.chunks = 0
        self.outcome = self.phase = ""
        self.relayed = self.single_chunk = False

    def end(self, outcome: Outcome, by: EndedBy, error: str = "", *, phase: str = "") -> None:
        """Record how it ended and in which phase; only the first call counts."""
        if not self.outcome:
            self.outcome, self.ended_by, self.error, self.phase = outcome, by, error, phase

    def end_by_client(self) -> None:
        """Record that the client disconnected; only the first end counts."""
        self.end("stream_cancelled" if self.relayed else "client_disconnected", "client")

    def add_failed_attempt(self, target: Worker, result: str, ended_at: float) -> None:
        """Record an attempt at a worker or rank. `result`: a status, or a name as in `retry_on`."""
        self.failed_attempts = [*(self.failed_attempts or ()), (target, result)]
        if self.trace is not None:
            self.trace.end_attempt(target, ended_at, result)

    def attempt_results(self) -> list[tuple[Worker, str]]:
        """Each attempt's result, in order: the failed ones, then the worker's response."""
        results = list(self.failed_attempts or ())
        target = self.sent_to
        if target is not None and self.response_head_at and len(results) < self.attempts:
            results.append((target, str(self.status)))
        return results

    @property
    def sent_to(self) -> Worker | None:
        """The target of the current attempt, or else of the last one: a rank, or a worker without
        ranks."""
        if self.worker is not None:
            return self.rank or self.worker
        rank = self.last_rank
        return rank if rank is not None and rank.worker is self.last_worker else self.last_worker

    def reads_usage(self) -> bool:
        """Whether its caller or its trace needs the token counts of the response."""
        return self.caller is not None or (self.trace is not None and self.trace.sampled)

    def spans_versions(self, worker: Worker) -> bool:
        """Whether the weights changed between the start and the end of its response."""
        return self.relayed and worker.weight_version.differs_from(self.weight_version)


class TwoLegs(msgspec.Struct, gc=False, eq=False):
    """The prefill leg of an exchange whose own worker is a decode worker."""

    connector: str
    # The current or last prefill leg, as a separate exchange; None if the decode worker computes
    # the prompt itself, for the reason in `fallback`.
    prefill: Exchange | None
    fallback: str = ""
    begun: bool = False  # the leg runs, and will release its own worker
    rid: str = ""  # the request id for SGLang's engines
    transfer_failures: int = 0  # failed transfers of the KV cache


class LineSink(Protocol):
    """Accepts log lines without waiting; drops a line that it can't store."""

    def write(self, record: bytes) -> None: ...


class GapRecorder(Protocol):
    """Counts seconds between two chunks of a response. Callers append them to `late`, and call
    `sort_in` when there are many."""

    late: list[float]

    def sort_in(self) -> None:
        """Count and clear `late`, which stays the same list."""


class RequestObserver(Protocol):
    """Counts exchanges that have ended, and some events of running ones."""

    def record(self, exchange: Exchange, worker: Worker | None) -> None: ...

    def note_trace(self, exchange: Exchange, worker: Worker | None) -> None:
        """The exchange has ended, and its trace is sampled."""

    def record_prefill(self, exchange: Exchange, worker: Worker) -> None:
        """A prefill leg succeeded."""

    def gap_histogram(self, exchange: Exchange) -> GapRecorder | None: ...

    def count_target(self, alias: str, target: str) -> None: ...

    def count_cached(self, worker: Worker, predicted: int, reported: int) -> None:
        """Count prompt tokens that were predicted to be cached, and that the worker reported."""


class Recorders:
    """The current observers; None for one that is disabled."""

    def __init__(self) -> None:
        self.access_log: LineSink | None = None
        self.spans: LineSink | None = None
        self.route_log: LineSink | None = None
        self.meters: RequestObserver | None = None


class UnobservedGaps:
    """A `GapRecorder` that discards the gaps, so that the relay needs no check."""

    def __init__(self) -> None:
        self.late: list[float] = []

    def sort_in(self) -> None:
        self.late.clear()
