"""Faults in a simulation: workers that die, slow down, join, or lose their cache, and lost KV
events.

Syntax: `die:W@SECS`, `slow:W@SECSxFACTOR`, `join@SECS`, `evict:W@SECS`, `lose_events:SHARE`; W
counts from 0, SHARE is from 0 to 1 and applies to the whole run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["die", "slow", "join", "evict", "lose_events"]

_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_DIE_OR_EVICT: Final = re.compile(rf"(die|evict):(\d+)@{_NUMBER}")
_SLOW: Final = re.compile(rf"slow:(\d+)@{_NUMBER}x{_NUMBER}")
_JOIN: Final = re.compile(rf"join@{_NUMBER}")
_LOSE: Final = re.compile(rf"lose_events:{_NUMBER}")
EXPECTED: Final = "die:W@SECS, slow:W@SECSxFACTOR, join@SECS, evict:W@SECS or lose_events:SHARE"


@dataclass(frozen=True, slots=True)
class Fault:
    """`worker`: index of the worker, -1 for one that joins. `share`: share of KV event batches that
    are lost."""

    kind: Kind
    at: float
    worker: int = -1
    factor: float = 1.0
    share: float = 0.0


def parse_fault(text: str) -> Fault:
    """Raises ValueError with the reason."""
    if match := _DIE_OR_EVICT.fullmatch(text):
        kind: Kind = "die" if match[1] == "die" else "evict"
        return Fault(kind, float(match[3]), int(match[2]))
    if match := _SLOW.fullmatch(text):
        if not float(match[3]):
            raise ValueError("the factor of slow must be above 0")
        return Fault("slow", float(match[2]), int(match[1]), float(match[3]))
    if match := _JOIN.fullmatch(text):
        return Fault("join", float(match[1]))
    if match := _LOSE.fullmatch(text):
        if float(match[1]) > 1:
            raise ValueError("the share of lose_events must be from 0 to 1")
        return Fault("lose_events", 0.0, share=float(match[1]))
    raise ValueError(f"expected {EXPECTED}")
