"""One request with its response, as data: what it is, how far it has come, how it ended; and the
interfaces of what observes it, log sinks and metrics.

Invariant: nothing here does I/O or reads a clock. The event loop (fast path) and the coroutine of
the connection write the same object, one after the other; `exchange_io.finalize` reads it at the
end. An observer neither waits nor fails, and keeps no reference to an exchange.
"""

from __future__ import annotations

from random import getrandbits
from typing import Final, Protocol

import msgspec

from omni_proxy.api_keys.caller import ApiCaller
from omni_proxy.dataplane.tracing.request_trace import RequestTrace
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.weight_version import UNKNOWN_VERSION, WeightVersion
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.pick_record import PickRecord
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import Route
from omni_proxy.wire.forwarded import ForwardedHeaders
from omni_proxy.wire.request import RequestHead

REQUEST_ID_NAME: Final = b"X-SGLang-Omni-Request-ID: "


class Exchange:
    """Times are of the event loop's clock in seconds, 0.0 for a phase that was not reached."""

    __slots__ = (
        "admitted", "attempts", "body", "body_at", "bytes_in", "bytes_out", "caller",
        "candidates", "chunks", "client", "connect_secs", "cors", "ended_at", "ended_by",
        "error", "failed_attempts", "first_at", "half_open_id", "head_at", "held_bytes",
        "idempotency_key", "last_chunk", "last_rank", "last_worker", "legs", "longest_gap",
        "method", "outcome", "own_secs", "phase", "policy", "queued_secs", "rank",
        "relayed", "request_bucket", "request_id", "request_id_line", "requirements",
        "reserved", "response_head_at", "route", "sent_at", "single_chunk", "spare_leg",
        "started_at", "status", "stream", "target", "token_bucket", "trace", "version",
        "worker", "worker_seen",
    )  # fmt: skip

    def __init__(self, started_at: float, client: str) -> None:
        self.started_at = started_at  # its first byte
        self.client = client  # address of the client
        self.head_at = 0.0
        self.body_at = 0.0
        self.sent_at = 0.0  # the request left for the worker
        self.response_head_at = 0.0  # the head of the response came
        self.first_at = 0.0  # the first chunk of its body
        self.ended_at = 0.0
        self.queued_secs = 0.0
        self.connect_secs = 0.0  # of the newest connection that had to be opened
        self.own_secs = 0.0  # of the proxy: from the events that it came with to its sending
        self.longest_gap = 0.0  # seconds between two chunks of the response
        self.method = "-"  # until the head could be parsed
        self.target = "-"
        self.request_id = b""
        self.cors = b""  # header lines that let a page of another origin read the response
        self.request_id_line = b""  # the header line with the request id, where one is configured
        self.idempotency_key = False
        self.trace: RequestTrace | None = None  # where traces are sent
        self.route: Route | None = None
        self.requirements: Requirements | None = None
        self.policy = ""
        self.candidates: PickRecord | None = None  # of its first pick, where they were recorded
        self.caller: ApiCaller | None = None  # with a key of [[keys]]
        self.reserved = -1  # tokens; these three are of `admission.caller_admission`
        self.request_bucket = self.token_bucket = 0
        self.body = b""  # of the request, as long as it may have to be sent again
        self.worker: Worker | None = None  # of the present attempt
        self.rank: DpRank | None = None  # of `worker`, where that has ranks
        self.legs: TwoLegs | None = None  # of the present attempt, at a decode worker
        # The prefill leg of the last request that used this exchange, to be used again, too.
        self.spare_leg: Exchange | None = None
        # Of the last attempt that is over.
        self.last_worker: Worker | None = None
        self.last_rank: DpRank | None = None
        self.version: WeightVersion = UNKNOWN_VERSION  # of the worker when the attempt began
        self.worker_seen: tuple[str, bool, bool] = ("", False, False)
        self.attempts = 0
        # Failed attempts: worker or rank, and the result.
        self.failed_attempts: list[tuple[Worker, str]] | None = None
        self.half_open_id = 0  # the number of the half-open trial that the present attempt is
        self.last_chunk = b""  # of the response, where token counts are read in it
        self.admitted = False  # counted as in flight
        self.held_bytes = 0  # of its request, counted in `inflight.held_bytes`
        self.relayed = False  # bytes of a response have left for the client
        # Sent at once at the first attempt, and its response sent on whole when it came.
        self.single_chunk = False
        self.stream = False
        self.status = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.chunks = 0  # chunks of the response
        self.outcome = ""
        self.ended_by = ""
        self.error = ""
        self.phase = ""

    def recycle(self, now: float) -> None:
        """Make it as new, for the next request with the same head on the same connection. Only for
        an exchange that the fast path has completed: what that never sets is left alone, and so are
        the facts of the head and what each request sets before anything reads it."""
        self.started_at = self.head_at = self.body_at = now
        self.sent_at = self.response_head_at = self.first_at = self.own_secs = 0.0
        self.attempts = self.status = self.bytes_out = self.chunks = 0
        self.outcome = self.phase = ""
        self.relayed = self.single_chunk = False
        self.candidates = None

    def end(self, outcome: str, by: str, error: str = "", *, phase: str = "") -> None:
        """Note how it ended and where; the first call stands."""
        if not self.outcome:
            self.outcome, self.ended_by, self.error, self.phase = outcome, by, error, phase

    def attempt_results(self) -> list[tuple[Worker, str]]:
        """Each attempt's result, in order: the failed ones, then the worker's response."""
        results = list(self.failed_attempts or ())
        target = self.sent_to
        if target is not None and self.response_head_at and len(results) < self.attempts:
            results.append((target, str(self.status)))
        return results

    @property
    def sent_to(self) -> Worker | None:
        """What the present attempt, or else the last one, was sent to: a rank, or a worker that has
        none."""
        if self.worker is not None:
            return self.rank or self.worker
        rank = self.last_rank
        return rank if rank is not None and rank.worker is self.last_worker else self.last_worker

    def reads_usage(self) -> bool:
        """Whether its caller or its trace is told the tokens of the response."""
        return self.caller is not None or (self.trace is not None and self.trace.sampled)

    def spans_versions(self, worker: Worker) -> bool:
        """Whether its response began with other weights than it ended with."""
        return self.relayed and worker.version.differs_from(self.version)


class TwoLegs(msgspec.Struct, gc=False, eq=False):
    """The other leg of an exchange whose own worker is a decode worker."""

    connector: str
    # The present or last prefill leg, as an exchange of its own; None while the decode worker
    # computes the prompt itself, then `fallback` says why.
    prefill: Exchange | None
    fallback: str = ""
    begun: bool = False  # the leg runs, and will release its worker by itself
    rid: str = ""  # what SGLang's engines call the request
    transfer_failures: int = 0  # of the KV cache


def new_request_id() -> bytes:
    return b"%032x" % getrandbits(128)


def id_from_body(need: Requirements) -> bytes:
    """The id of a request whose head has none. One from a body may hold anything; in a head only
    visible ASCII may stand."""
    text = need.request_id
    if text and len(text) <= 256 and text.isascii() and text.isprintable():
        return text.encode()
    return new_request_id()


def add_forwarded(forwarded: ForwardedHeaders, exchange: Exchange, head: RequestHead) -> None:
    """Add the client's address and the request id to the lines that go on, as configured."""
    head.lines += forwarded.forwarded_for_line(exchange.client)
    if forwarded.id_name:
        head.lines = forwarded.set_request_id(head.lines, exchange.request_id)
        exchange.request_id_line = forwarded.request_id_line(exchange.request_id)


class LineSink(Protocol):
    """Takes log lines; each at once, and drops it rather than wait."""

    def write(self, record: bytes) -> None: ...


class GapRecorder(Protocol):
    """Seconds between two chunks of a response: appended to `late`, sorted into buckets later."""

    late: list[float]

    def sort_in(self) -> None:
        """Empties `late`, which stays the same list."""


class RequestObserver(Protocol):
    """Counts exchanges that have ended, and what of the others can't wait for that."""

    def record(self, exchange: Exchange, worker: Worker | None) -> None: ...

    def note_trace(self, exchange: Exchange, worker: Worker | None) -> None:
        """It has ended, and its trace is sampled."""

    def record_prefill(self, exchange: Exchange, worker: Worker) -> None:
        """A prefill leg ended well."""

    def gap_histogram(self, exchange: Exchange) -> GapRecorder | None: ...

    def count_target(self, alias: str, target: str) -> None: ...

    def count_cached(self, worker: Worker, predicted: int, reported: int) -> None:
        """Prompt tokens that the worker was believed to have cached, and that it had."""


class Recorders:
    """The observers in use; None where one is switched off."""

    def __init__(self) -> None:
        self.access_log: LineSink | None = None
        self.spans: LineSink | None = None
        self.route_log: LineSink | None = None
        self.meters: RequestObserver | None = None


class UnobservedGaps:
    """Gaps that nothing counts: taken all the same, so that the relay need not ask."""

    def __init__(self) -> None:
        self.late: list[float] = []

    def sort_in(self) -> None:
        self.late.clear()
