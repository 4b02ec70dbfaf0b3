"""Measures weight delivery: plain gloo, the project's receiver, and a fleet behind the proxy.

`python -m tools.bench --weights`. Every rate is also a ratio, within a round whose legs run within
seconds of each other, to a plain gloo broadcast from one process into memory that was touched
before. memory.py and loop_delay.py describe how memory and event-loop delays are measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tools.bench.harness import report
from tools.bench.harness.processes import end_on_signals
from tools.bench.weights.delivery import Relayed
from tools.bench.weights.fleet import PEAK, FleetError, through
from tools.bench.weights.fleet import WANTED as FLEET_WANTED
from tools.bench.weights.fleet import rows_of as fleet_rows
from tools.bench.weights.receivers import OmniReceiver, Plain, WeightsBenchError, sender

MIB = 1 << 20
BLOCK_MIB = 64
Rates = dict[str, list[float]]  # GB/s by leg, one per round


def by_parts(total_mib: int, rounds: int) -> tuple[Rates, float]:
    """GB/s of memory, plain gloo and the receiver; and the receiver's peak memory in buckets."""
    import torch

    torch.set_num_threads(1)
    count = max(total_mib // BLOCK_MIB, 1)
    nbytes = count * BLOCK_MIB * MIB
    with sender(count, BLOCK_MIB * MIB) as sends:
        plain = Plain(sends)
        child, thread = OmniReceiver(sends, "process"), OmniReceiver(sends, "thread")
        relayed = Relayed(child, plain.blocks)
        legs: dict[str, Callable[[], float]] = {
            MEMCPY: lambda: _copied(plain.blocks),
            PLAIN: plain.secs,
            "receiver, in a child": child.secs,
            "receiver, in a thread": thread.secs,
            "receiver, with SHA-256": lambda: child.secs(digests=True),
            "receiver, shared memory, worker": relayed.secs,
        }
        rates: Rates = {name: [] for name in legs}
        try:
            for number in range(rounds + 1):
                turn = list(legs.items())
                for name, leg in turn if number % 2 == 0 else turn[::-1]:
                    secs = leg()
                    if number:  # the first one touches memory
                        rates[name].append(nbytes / secs / 1e9)
            peak = max(child.peak_buckets() for _ in range(rounds))
        finally:
            child.close()
            thread.close()
    return rates, peak


MEMCPY, PLAIN = "memcpy, touched", "plain gloo, one to one"
WANTED = {
    "receiver, in a child": "at least 0.85",
    "receiver, in a thread": "at least 0.85",
    "receiver, with SHA-256": "at least 0.4",
    "receiver, shared memory, worker": "at least 0.75",
}


def _copied(blocks: Sequence[Any]) -> float:
    half = len(blocks) // 2
    started = time.perf_counter()
    for _ in range(2):
        for target, source in zip(blocks[:half], blocks[half:], strict=False):
            target.copy_(source)
    return time.perf_counter() - started


def by_fleets(rounds: int) -> list[list[str]]:
    """The rows of both modes with a model of 538 MB; each round has its own plain gloo leg."""
    count = 8
    rows = []
    with sender(count, BLOCK_MIB * MIB) as sends:
        plain = Plain(sends)
        nbytes = count * BLOCK_MIB * MIB
        for mode in ("coordinate", "receive"):
            measured = through(mode, lambda: nbytes / plain.secs() / 1e9, rounds)
            rows += fleet_rows(mode, measured)
    return rows


def rows_of(rates: Rates) -> list[list[str]]:
    rows = [["", "GB/s", "by plain gloo in a round", "wanted"]]
    for name, found in rates.items():
        ratios = [ours / plain for ours, plain in zip(found, rates[PLAIN], strict=True)]
        shown = "" if name == PLAIN else report.spread(ratios, 2)
        rows.append([name, report.spread(found, 2), shown, WANTED.get(name, "")])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench --weights", description=__doc__)
    parser.add_argument("--rounds", type=int, choices=range(1, 11), metavar="1..10", default=5)
    parser.add_argument(
        "--mib", type=int, choices=range(128, 4097), metavar="128..4096", default=512
    )
    parser.add_argument(
        "--no-fleet", action="store_true", help="measure only the parts, without a model"
    )
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads don't spin
    end_on_signals()
    facts = report.machine()
    try:
        rates, peak = by_parts(arguments.mib, arguments.rounds)
        rows = rows_of(rates)
        rows.append(
            [
                f"receiver, in a child: peak extra memory, {PEAK}",
                f"{peak:.2f}",
                "",
                FLEET_WANTED[PEAK],
            ]
        )
        if not arguments.no_fleet:
            rows += by_fleets(arguments.rounds)
    except (WeightsBenchError, FleetError) as error:
        print(f"tools.bench.weights: {error}", file=sys.stderr)
        return 1
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    print()
    print("\n".join(report.columns(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
