"""The trace of one request: its ids, and the spans of its attempts and waits while it runs.

A worker gets the id of its attempt's span as `traceparent`. Of a request that is not sampled it
gets the flag 00, so that it begins no trace of its own. Invariant: the trace, and whether it is
sampled, come from the client's context where there is one (W3C Trace Context 3.2). No I/O, and
nothing is kept of a request that is not sampled.
"""

from __future__ import annotations

from random import getrandbits
from typing import Final

from omni_proxy.dataplane.tracing.trace_context import (
    TraceParent,
    drop_state,
    format_traceparent,
    parse_traceparent,
    read_traceparent,
    with_traceparent,
)
from omni_proxy.fleet.worker import Worker

DRAW_BITS: Final = 64
EVERY: Final = 1 << DRAW_BITS
MAX_SPANS: Final = 64  # of one request; further attempts are sent, and not recorded


def new_trace_id() -> bytes:
    return b"%032x" % getrandbits(128)


def new_span_id() -> bytes:
    return b"%016x" % (getrandbits(64) or 1)


class AttemptSpan:
    """An attempt at `target`, a worker or one of its ranks. Times are the event loop's; `error`:
    why it failed, as in `retry_on`, or ""."""

    __slots__ = ("ended_at", "error", "span_id", "started_at", "target")

    def __init__(self, target: Worker, started_at: float) -> None:
        self.span_id = new_span_id()
        self.target = target
        self.started_at = started_at
        self.ended_at = 0.0  # 0: not over, or at the end of the request
        self.error = ""


class RequestTrace:
    """`parent_id`: the span that sent the request, or b"". `span_id`: that of the request here."""

    __slots__ = ("attempts", "parent_id", "sampled", "span_id", "trace_id", "waits")

    def __init__(self, trace_id: bytes, parent_id: bytes = b"", *, sampled: bool = True) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = new_span_id()
        self.sampled = sampled
        self.attempts: list[AttemptSpan] = []
        self.waits: list[tuple[float, float]] = []  # in the queue

    def begin_attempt(self, target: Worker | None, now: float) -> bytes:
        """The traceparent for it."""
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
        """The lines of a head as this attempt sends them."""
        if not self.sampled and read_traceparent(lines) is not None:
            return lines  # the client's own, not sampled either
        return with_traceparent(lines, self.begin_attempt(target, now))

    def end_attempt(self, target: Worker, now: float, error: str) -> None:
        """The last attempt at it has failed."""
        for span in reversed(self.attempts):
            if span.target.worker is target.worker and not span.ended_at:
                span.ended_at, span.error = now, error
                return

    def add_wait(self, started_at: float, ended_at: float) -> None:
        if self.sampled and len(self.waits) < MAX_SPANS:
            self.waits.append((started_at, ended_at))


UNSAMPLED: Final = RequestTrace(b"", sampled=False)


class Tracing:
    """Begins traces. `sampling`: the share of those that begin here, 0 to 1; of `DRAW_BITS` random
    bits those that are below `sampled_below` make a trace sampled."""

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
        """Of a head in parts, see `trace_parts`; None where it is not sampled. `index`: where the
        value of its traceparent is. With -1 there is none, and it has been drawn that the trace is
        sampled; else the parts get `UNSAMPLED_LINE`."""
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
    """As `lines_for_attempt`, of a head in parts and a request that is sampled; an index as
    above."""
    value = trace.begin_attempt(target, now)
    if index < 0:
        parts.append(b"traceparent: %b\r\n" % value)
    else:
        parts[index] = value


# One half of the id of a trace that nobody records is of the process, and so is its span: half as
# many random digits cost half as much. The line is for the bits that were drawn for it.
_UNSAMPLED: Final = b"00-%016x%%016x-%016x-00" % (getrandbits(64) or 1, getrandbits(64) or 1)
UNSAMPLED_LINE: Final = b"traceparent: " + _UNSAMPLED + b"\r\n"


def _unsampled_value() -> bytes:
    return _UNSAMPLED % getrandbits(DRAW_BITS)
