"""Converts legs to tables: medians with their range, and ratios within each round.

The legs of a round run within seconds of each other, so their ratio is valid even if the machine's
speed drifts; medians of different hours are not comparable.
"""

import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from tools.bench.harness.load_run import Leg

Round = dict[str, Leg]  # by the side's name


def machine() -> dict[str, str]:
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "cpu": f"{len(models)} x {models[0] if models else platform.machine()}",
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}"
        f" ({sys.executable})",
        "load_average": Path("/proc/loadavg").read_text().split()[0],
    }


def ratios(rounds: Sequence[Round], ours: str, peer: str) -> list[float]:
    """CPU of `ours` by CPU of the peer, for each round in which both were measured."""
    pairs = [(costs([legs], ours), costs([legs], peer)) for legs in rounds]
    return [own[0] / theirs[0] for own, theirs in pairs if own and theirs and theirs[0]]


def spread(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return "-"
    low, middle, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{middle} ({low}..{high})"


def _of(rounds: Sequence[Round], side: str) -> list[Leg]:
    return [legs[side] for legs in rounds if side in legs]


def added_us(rounds: Sequence[Round], side: str, bare: str) -> list[float]:
    """Latency that a side adds to the median, for each round that was also measured without it."""
    pairs = [(_of([legs], side), _of([legs], bare)) for legs in rounds]
    return [own[0].p50_us - alone[0].p50_us for own, alone in pairs if own and alone]


def costs(rounds: Sequence[Round], side: str) -> list[float]:
    """CPU per unit in microseconds, one for each round."""
    return [leg.cpu_us for leg in _of(rounds, side) if leg.cpu_us is not None]


def cpu_table(
    loads: dict[str, list[Round]], ours: str | None, peers: Sequence[str] = ()
) -> list[str]:
    sides = [*peers, *([ours] if ours else [])]
    paired = peers if ours else ()
    rows = [["load", *sides, *(f"by {peer}" for peer in paired)]]
    for load, rounds in loads.items():
        row = [load, *(spread(costs(rounds, side)) for side in sides)]
        row += [spread(ratios(rounds, ours or "", peer), 2) for peer in paired]
        rows.append(row)
    return columns(rows)


def added_table(loads: dict[str, list[Round]], sides: Sequence[str], bare: str) -> list[str]:
    """The added latencies; empty if nothing was measured without a proxy."""
    rows = [
        [load, *(spread(added_us(rounds, side, bare), 0) for side in sides)]
        for load, rounds in loads.items()
        if _of(rounds, bare)
    ]
    return columns([["load", *sides], *rows]) if rows else []


def seen_table(loads: dict[str, list[Round]]) -> list[str]:
    rows = [
        ["load", "through", "per s", "p50 us", "p99 us", "gap p99 us", "reads", "MiB", "errors"]
    ]
    for load, rounds in loads.items():
        for side in dict.fromkeys(side for legs in rounds for side in legs):
            legs = _of(rounds, side)
            rss = [leg.rss_mib for leg in legs if leg.rss_mib is not None]
            gap = median(leg.gap_p99_us for leg in legs)
            rows.append(
                [
                    load,
                    side,
                    f"{median(leg.per_sec for leg in legs):.0f}",
                    f"{median(leg.p50_us for leg in legs):.0f}",
                    f"{median(leg.p99_us for leg in legs):.0f}",
                    f"{gap:.0f}" if gap else "-",
                    f"{median(leg.reads_per_unit for leg in legs):.2f}",
                    f"{median(rss):.0f}" if rss else "-",
                    str(sum(leg.errors for leg in legs)),
                ]
            )
    return columns(rows)


def faults(loads: dict[str, list[Round]]) -> list[str]:
    return [
        f"{load}, round {number}, through {leg.side}: {leg.errors} errors, first: {leg.first_error}"
        for load, rounds in loads.items()
        for number, legs in enumerate(rounds, 1)
        for leg in legs.values()
        if leg.errors
    ]


def columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
