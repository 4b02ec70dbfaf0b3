"""W3C trace context: reads and writes the `traceparent` field of a request.

Pure. Invariant: an invalid field is ignored, so a new trace begins (Trace Context 2.2.2, 3.2.2.3),
and only version 00 is written. `tracestate` is not read: it is forwarded unchanged if the trace
continues, and dropped if a new one begins (3.3, 4.3).
Source: https://www.w3.org/TR/trace-context-1/
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

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
    found = _VALUE.fullmatch(value)
    if found is None or (found[1] == b"00" and found[5] is not None):
        return None
    return TraceParent(found[2], found[3], bool(int(found[4], 16) & _SAMPLED))


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
