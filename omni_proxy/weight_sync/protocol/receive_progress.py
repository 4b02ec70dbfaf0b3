"""How much of a transfer each member has received, and whether the transfer has stalled. Pure.

Invariant: a member that reports nothing, or only repeats an old report, never counts as stalled.
Nor does a member that has received everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

FAILED: Final = "failed"
RECEIVING: Final = "receiving"


@dataclass(frozen=True, slots=True)
class ReceiveProgress:
    """`state` as the member names it. `received`: buckets and bytes.

    `age_secs` of the transfer distinguishes a new report from a repeated one.
    """

    state: str
    received: tuple[int, int]
    age_secs: float
    error: str = ""


def parse_progress(info: object) -> ReceiveProgress | None:
    """The progress in a /server_info response; None if it has none."""
    report = info.get("weight_sync") if isinstance(info, Mapping) else None
    if not isinstance(report, Mapping) or not isinstance(report.get("state"), str):
        return None
    error = report.get("error")
    return ReceiveProgress(
        report["state"],
        (_count(report, "buckets_done"), _count(report, "bytes_come")),
        _secs(report),
        error if isinstance(error, str) else "",
    )


class StallDetector:
    """Watches one armed transfer, from `now` on."""

    def __init__(self, now: float) -> None:
        self._last: dict[str, ReceiveProgress] = {}
        self._progress_at = now

    def update(
        self,
        now: float,
        reports: Mapping[str, ReceiveProgress],
        stall_secs: float,
        first_secs: float,
    ) -> tuple[str, str]:
        """Return why the transfer will not complete, and the member that failed, if one did.

        ("", "") while it may still complete. The limit is `stall_secs` without progress, and at
        least `first_secs` while nothing has been received.
        """
        for name, report in reports.items():
            if report.state == FAILED and report.error:
                return f"{name}: its receive ended: {report.error}", name
        fresh = {name: report for name, report in reports.items() if self._is_new(name, report)}
        waiting = [name for name, report in fresh.items() if report.state == RECEIVING]
        moved = any(report.received != self._received(name) for name, report in fresh.items())
        self._last |= fresh
        if moved or not waiting:
            self._progress_at = now
        started = any(any(report.received) for report in self._last.values())
        limit = stall_secs if started else max(stall_secs, first_secs)
        if now - self._progress_at < limit:
            return "", ""
        return f"nothing has come for {limit:g} s: {', '.join(waiting)}", ""

    def _is_new(self, name: str, report: ReceiveProgress) -> bool:
        last = self._last.get(name)
        return last is None or (last.state, last.age_secs) != (report.state, report.age_secs)

    def _received(self, name: str) -> tuple[int, int]:
        last = self._last.get(name)
        return last.received if last is not None else (0, 0)


def _count(report: Mapping[str, Any], key: str) -> int:
    value = report.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _secs(report: Mapping[str, Any]) -> float:
    value = report.get("secs")
    return float(value) if isinstance(value, int | float) else 0.0
