"""The trace of one request: its W3C trace context, and the spans of its attempts and waits.

A worker gets the id of its attempt's span as `traceparent`, and the flag 00 if the request is not
sampled, so that it starts no trace of its own. Invariants: the trace id and the sampling decision
are those of the client's context if it sent a valid one, and an invalid one is ignored (Trace
Context 2.2.2, 3.2); only version 00 is written. `tracestate` is forwarded unchanged if the trace
continues, and dropped if a new one begins (3.3, 4.3). No data is stored for a request that is not
sampled. Source: https://www.w3.org/TR/trace-context-1/
"""

from __future__ import annotations

import re
from random import getrandbits
from typing import Final

import msgspec

from omni_proxy.fleet.worker import Worker
from omni_proxy.wire.forwarded import field_value
from omni_proxy.wire.request import drop_field, drop_fields

FIELD: Final = b"traceparent"
STATE: Final = b"tracestate"
_FIELDS: Final = frozenset((FIELD,))
_BOTH: Final = frozenset((FIELD, STATE))
_SAMPLED: Final = 1
# Later versions may have more fields after another dash; version ff is invalid.
_VALUE: Final = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class TraceParent(msgspec.Struct, frozen=True, gc=False):
    """`trace_id`: 32 hexadecimal digits. `span_id`: 16, of the span that sent the request."""

    trace_id: bytes
    span_id: bytes
    sampled: bool


def parse_traceparent(value: bytes) -> TraceParent | None:
    """None if the value is invalid."""
    match = _VALUE.fullmatch(value)
    if match is None or (match[1] == b"00" and match[5] is not None):
        return None
    return TraceParent(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))


def read_traceparent(lines: bytes) -> TraceParent | None:
    """The trace context in the lines of a head; None without a valid one."""
    value = field_value(lines, FIELD)
    return parse_traceparent(value) if value else None


def format_traceparent(trace_id: bytes, span_id: bytes, *, sampled: bool) -> bytes:
    return b"00-%b-%b-0%d" % (trace_id, span_id, sampled)


def with_traceparent(lines: bytes, value: bytes) -> bytes:
    """The lines of a head with `value` as the only traceparent."""
    lowered = lines.lower()
    if STATE in lowered and read_traceparent(lines) is None:
        lines = drop_fields(lines, _BOTH)
    elif FIELD in lowered:
        lines = drop_fields(lines, _FIELDS)
    return b"%btraceparent: %b\r\n" % (lines, value)


def drop_state(parts: list[bytes], index: int) -> None:
    """Drop the tracestate from a head in parts. `index`: that of its invalid traceparent, which
    keeps its index."""
    before, after = b"".join(parts[:index]), b"".join(parts[index + 1 :])
    parts[:index] = [b""] * (index - 1) + [drop_field(before, STATE)]
    parts[index + 1 :] = [drop_field(after, STATE)]


def has_state_alone(lines: bytes) -> bool:
    """Whether a head has a tracestate and no traceparent."""
    lowered = lines.lower()
    return b"\r\n%b:" % STATE in lowered and b"\r\n%b:" % FIELD not in lowered


def traceparent_index(parts: list[tuple[bytes, bool]]) -> int:
    """The index of the traceparent's value in the parts that a head template returns, or -1.
    `parts`: for each varying value the text before it, and whether the value is forwarded."""
    forwarded = 0
    for before, is_forwarded in parts:
        if is_forwarded:
            name = before.rpartition(b"\n")[2].partition(b":")[0].lower()
            if name == FIELD:
                return 2 * forwarded + 1
            forwarded += 1
    return -1


DRAW_BITS: Final = 64
EVERY: Final = 1 << DRAW_BITS
MAX_SPANS: Final = 64  # of one request; further attempts are not recorded


def new_trace_id() -> bytes:
    return b"%032x" % getrandbits(128)


def new_span_id() -> bytes:
    return b"%016x" % (getrandbits(64) or 1)


class AttemptSpan:
    """An attempt at `target`, a worker or one of its ranks. Times are the event loop's. `error`:
    why it failed, as in `retry_on`, or ""."""

    __slots__ = ("ended_at", "error", "span_id", "started_at", "target")

    def __init__(self, target: Worker, started_at: float) -> None:
        self.span_id = new_span_id()
        self.target = target
        self.started_at = started_at
        self.ended_at = 0.0  # 0: still running, or ended with the request
        self.error = ""


class RequestTrace:
    """`parent_id`: the client's span, or b"". `span_id`: the server span of the request."""

    __slots__ = ("attempts", "parent_id", "sampled", "span_id", "trace_id", "waits")

    def __init__(self, trace_id: bytes, parent_id: bytes = b"", *, sampled: bool = True) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = new_span_id()
        self.sampled = sampled
        self.attempts: list[AttemptSpan] = []
        self.waits: list[tuple[float, float]] = []  # start and end of each wait in the queue

    def begin_attempt(self, target: Worker | None, now: float) -> bytes:
        """Begin the span of an attempt; returns the traceparent to send."""
        if not self.sampled:
            return _unsampled_value()
        span_id = self.span_id
        if target is not None and len(self.attempts) < MAX_SPANS:
            for before in self.attempts:
                if not before.ended_at and before.target.worker is target.worker:
                    before.ended_at, before.error = now, before.error or "stale_connection"
            span = AttemptSpan(target, now)
            self.attempts.append(span)
            span_id = span.span_id
        return format_traceparent(self.trace_id, span_id, sampled=True)

    def lines_for_attempt(self, lines: bytes, target: Worker | None, now: float) -> bytes:
        """The lines of a head with the traceparent of this attempt."""
        if not self.sampled and read_traceparent(lines) is not None:
            return lines  # with the client's own traceparent, which is not sampled either
        return with_traceparent(lines, self.begin_attempt(target, now))

    def end_attempt(self, target: Worker, now: float, error: str) -> None:
        """End the span of the last attempt at `target`, which has failed."""
        for span in reversed(self.attempts):
            if span.target.worker is target.worker and not span.ended_at:
                span.ended_at, span.error = now, error
                return

    def add_wait(self, started_at: float, ended_at: float) -> None:
        if self.sampled and len(self.waits) < MAX_SPANS:
            self.waits.append((started_at, ended_at))


UNSAMPLED: Final = RequestTrace(b"", sampled=False)


class Tracing:
    """Begins traces. `sampling`: the sampled share of the traces that begin here, 0 to 1. A trace
    is sampled if a number of `DRAW_BITS` random bits is below `sampled_below`."""

    def __init__(self, sampling: float) -> None:
        self.sampled_below = int(sampling * EVERY)

    def begin(self, parent: TraceParent | None) -> RequestTrace:
        if parent is not None:
            return RequestTrace(parent.trace_id, parent.span_id) if parent.sampled else UNSAMPLED
        if getrandbits(DRAW_BITS) < self.sampled_below:
            return RequestTrace(new_trace_id())
        return UNSAMPLED

    def begin_from_head(self, lines: bytes) -> RequestTrace:
        return self.begin(read_traceparent(lines))

    def begin_from_parts(self, parts: list[bytes], index: int) -> RequestTrace | None:
        """Begin the trace of a head in parts, see `trace_parts`; None if it is not sampled.

        `index`: index of the traceparent's value in `parts`. -1: the head has none, and the caller
        has already decided to sample; otherwise it appends `UNSAMPLED_LINE`.
        """
        if index < 0:
            return RequestTrace(new_trace_id())
        parent = parse_traceparent(parts[index])
        if parent is None:
            drop_state(parts, index)
        trace = self.begin(parent)
        if trace.sampled:
            return trace
        if parent is None:
            parts[index] = _unsampled_value()
        return None


def trace_parts(
    trace: RequestTrace, parts: list[bytes], index: int, target: Worker, now: float
) -> None:
    """As `lines_for_attempt`, for a head in parts and a sampled request. `index`: index of the
    traceparent's value in `parts`, -1 if it has none."""
    value = trace.begin_attempt(target, now)
    if index < 0:
        parts.append(b"traceparent: %b\r\n" % value)
    else:
        parts[index] = value


# The ids of an unsampled trace are recorded nowhere, so only half of the trace id is random; the
# other half and the span id are constant in the process, which is cheaper. The line is formatted
# with the random bits of the sampling decision.
_UNSAMPLED: Final = b"00-%016x%%016x-%016x-00" % (getrandbits(64) or 1, getrandbits(64) or 1)
UNSAMPLED_LINE: Final = b"traceparent: " + _UNSAMPLED + b"\r\n"


def _unsampled_value() -> bytes:
    return _UNSAMPLED % getrandbits(DRAW_BITS)
