"""The result of a soak: each measured value with its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_proxy.simulate.report import percentile

MIB: Final = 1024 * 1024
P99_SECS: Final = 1.0  # of requests that no update held, during the attack
RSS_GROWTH: Final = 1.25  # the end may have this factor of the start, or this much more:
RSS_SLACK_BYTES: Final = 32 * MIB
DESCRIPTOR_SLACK: Final = 8


@dataclass(frozen=True, slots=True)
class Line:
    """One result; `bound` is its bound as text, "" for a value without one."""

    what: str
    found: str
    bound: str = ""
    holds: bool = True


def lines_of_times(times: dict[str, list[float]]) -> list[Line]:
    lines = []
    for phase, secs in sorted(times.items()):
        ordered = sorted(secs)
        p50, p99 = percentile(ordered, 50), percentile(ordered, 99)
        found = f"{len(secs)} requests, p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms"
        found += f", longest {max(secs) * 1000:.0f} ms"
        if phase == "siege":
            bound = f"p99 below {P99_SECS * 1000:.0f} ms"
            lines.append(Line(f"honest requests, {phase}", found, bound, p99 < P99_SECS))
        else:
            lines.append(Line(f"honest requests, {phase}", found))
    return lines


def memory_line(start: int, peak: int, end: int) -> Line:
    most = max(start * RSS_GROWTH, start + RSS_SLACK_BYTES)
    found = f"{start / MIB:.0f} MiB, peak {peak / MIB:.0f}, end {end / MIB:.0f}"
    return Line("memory of the proxy", found, f"end at most {most / MIB:.0f} MiB", end <= most)


def descriptor_line(start: int, peak: int, end: int) -> Line:
    most = start + DESCRIPTOR_SLACK
    return Line("its descriptors", f"{start}, peak {peak}, end {end}",
                f"end at most {most}", end <= most)  # fmt: skip


def none_of(what: str, found: list[str]) -> Line:
    words = "none" if not found else f"{len(found)}: " + "; ".join(found[:5])
    return Line(what, words, "none", not found)


def shown(lines: list[Line]) -> str:
    wide = max(len(line.what) for line in lines)
    reported = []
    for line in lines:
        bound = f"   ({line.bound}: {'yes' if line.holds else 'NO'})" if line.bound else ""
        reported.append(f"{line.what:{wide}}  {line.found}{bound}")
    return "\n".join(reported)
