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
    if found := _DIE_OR_EVICT.fullmatch(text):
        kind: Kind = "die" if found[1] == "die" else "evict"
        return Fault(kind, float(found[3]), int(found[2]))
    if found := _SLOW.fullmatch(text):
        if not float(found[3]):
            raise ValueError("the factor of slow must be above 0")
        return Fault("slow", float(found[2]), int(found[1]), float(found[3]))
    if found := _JOIN.fullmatch(text):
        return Fault("join", float(found[1]))
    if found := _LOSE.fullmatch(text):
        if float(found[1]) > 1:
            raise ValueError("the share of lose_events must be from 0 to 1")
        return Fault("lose_events", 0.0, share=float(found[1]))
    raise ValueError(f"expected {EXPECTED}")
