"""How far each member of a sync has come, by what it tells, and whether nothing comes any more.

Pure. Invariant: who tells nothing, or only what it had told before, is never taken for one that
stands still; nor is anybody once everything has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

FAILED: Final = "failed"
COMING: Final = "receiving"


@dataclass(frozen=True, slots=True)
class ReceiveProgress:
    """`state` in the member's own words. `age_secs` of the transfer tells a new look from an old.

    `come`: buckets and bytes.
    """

    state: str
    come: tuple[int, int]
    age_secs: float
    error: str = ""


def receiving_of(info: object) -> ReceiveProgress | None:
    """By a /server_info; None where that does not tell."""
    told = info.get("weight_sync") if isinstance(info, Mapping) else None
    if not isinstance(told, Mapping) or not isinstance(told.get("state"), str):
        return None
    error = told.get("error")
    return ReceiveProgress(
        told["state"],
        (_count(told, "buckets_done"), _count(told, "bytes_come")),
        _secs(told),
        error if isinstance(error, str) else "",
    )


class StallDetector:
    """Of one armed transfer, from `now` on."""

    def __init__(self, now: float) -> None:
        self._last: dict[str, ReceiveProgress] = {}
        self._moved_at = now

    def hear(
        self, now: float, told: Mapping[str, ReceiveProgress], stall_secs: float, first_secs: float
    ) -> tuple[str, str]:
        """Why it will not be completed, and the member that says so; ("", "") while it may.

        `stall_secs` without anything new end it, `first_secs` where nothing has come so far.
        """
        for name, each in told.items():
            if each.state == FAILED and each.error:
                return f"{name}: its receive ended: {each.error}", name
        fresh = {name: each for name, each in told.items() if self._is_new(name, each)}
        waiting = [name for name, each in fresh.items() if each.state == COMING]
        moved = any(each.come != self._come(name) for name, each in fresh.items())
        self._last |= fresh
        if moved or not waiting:
            self._moved_at = now
        begun = any(any(each.come) for each in self._last.values())
        limit = stall_secs if begun else max(stall_secs, first_secs)
        if now - self._moved_at < limit:
            return "", ""
        return f"nothing has come for {limit:g} s: {', '.join(waiting)}", ""

    def _is_new(self, name: str, each: ReceiveProgress) -> bool:
        before = self._last.get(name)
        return before is None or (before.state, before.age_secs) != (each.state, each.age_secs)

    def _come(self, name: str) -> tuple[int, int]:
        before = self._last.get(name)
        return before.come if before is not None else (0, 0)


def _count(told: Mapping[str, Any], key: str) -> int:
    value = told.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _secs(told: Mapping[str, Any]) -> float:
    value = told.get("secs")
    return float(value) if isinstance(value, int | float) else 0.0
