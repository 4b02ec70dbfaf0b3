"""One request with its response, as data: what it is, how far it has come, how it ended.

Invariant: nothing here does I/O or reads a clock. The event loop (fast path) and the coroutine of
the connection write the same object, one after the other; `exchange.finalize` reads it at the end.
"""

from __future__ import annotations

from random import getrandbits

import msgspec

from omni_proxy.fleet.weight_version import UNKNOWN_VERSION, WeightVersion
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import Route
from omni_proxy.wire.forwarded import ForwardedHeaders
from omni_proxy.wire.request import RequestHead


class Exchange(msgspec.Struct, gc=False):
    """Times are of the event loop's clock in seconds, 0.0 for a phase that was not reached."""

    started_at: float  # its first byte
    client: str  # address of the client
    head_at: float = 0.0
    body_at: float = 0.0
    dialled_at: float = 0.0  # the request left for the worker
    wait_at: float = 0.0  # the head of the response came
    first_at: float = 0.0  # the first chunk of its body
    ended_at: float = 0.0
    queued_secs: float = 0.0
    connect_secs: float = 0.0  # of the newest connection that had to be opened
    own_secs: float = 0.0  # of the proxy: from the events that it came with to its sending
    longest_gap: float = 0.0  # seconds between two chunks of the response
    method: str = "-"  # until the head could be parsed
    target: str = "-"
    request_id: bytes = b""
    cors: bytes = b""  # header lines that let a page of another origin read the response
    request_id_line: bytes = b""  # the header line with the request id, where one is configured
    idempotency_key: bool = False
    route: Route | None = None
    need: Requirements | None = None
    policy: str = ""
    body: bytes = b""  # of the request, as long as it may have to be sent again
    worker: Worker | None = None  # of the present attempt
    last_worker: Worker | None = None  # of an attempt that is over
    version: WeightVersion = UNKNOWN_VERSION  # of the worker's weights when the attempt began
    worker_seen: tuple[str, bool, bool] = ("", False, False)
    attempts: int = 0
    tried: list[tuple[Worker, str]] | None = None  # failed attempts and their results
    half_open_id: int = 0  # the number of the half-open trial that the present attempt is
    tail: bytes = b""  # the last chunk of the response, where token counts are read in it
    admitted: bool = False  # counted as in flight
    relayed: bool = False  # bytes of a response have left for the client
    stream: bool = False
    status: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    pieces: int = 0  # chunks of the response
    outcome: str = ""
    ended_by: str = ""
    error: str = ""
    phase: str = ""

    def end(self, outcome: str, by: str, error: str = "", *, phase: str = "") -> None:
        """Note how it ended and where; the first call stands."""
        if not self.outcome:
            self.outcome, self.ended_by, self.error, self.phase = outcome, by, error, phase

    def attempt_results(self) -> list[tuple[Worker, str]]:
        """Each attempt's result, in order: the failed ones, then the worker's response."""
        results = list(self.tried or ())
        worker = self.worker or self.last_worker
        if worker is not None and self.wait_at and len(results) < self.attempts:
            results.append((worker, str(self.status)))
        return results

    def spans_versions(self, worker: Worker) -> bool:
        """Whether its response began with other weights than it ended with."""
        return self.relayed and worker.version.differs_from(self.version)

    def set_requirements(self, need: Requirements, head_id: bytes) -> None:
        """`head_id`: the request id of its head, if any."""
        self.need = need
        self.stream = need.stream
        self.request_id = head_id or _id_from_body(need)

    def set_first_chunk(self, chunk: bytes, now: float) -> None:
        """The chunk of the response's body that came along with its head."""
        self.first_at = now
        self.pieces = 1
        self.bytes_out = len(chunk)


def new_request_id() -> bytes:
    return b"%032x" % getrandbits(128)


def _id_from_body(need: Requirements) -> bytes:
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
