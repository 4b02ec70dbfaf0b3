"""Rounds of legs: the sides run in turn under the same loads, within seconds of each other.

Only legs of the same round are comparable; which side runs first changes with each round.
"""

import sys
from collections.abc import Sequence

from tools.bench.harness.load_run import Leg, Load, fake_worker, run_leg
from tools.bench.harness.proxies import NOTHING, Side
from tools.bench.harness.report import Round

Loads = dict[str, list[Round]]  # by the load's name


def measure(sides: Sequence[Side], loads: Sequence[Load], rounds: int, secs: float) -> Loads:
    """Run all rounds. Raises LegError, BuildError."""
    found: Loads = {}
    with fake_worker() as workers:
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            turn = sides if number % 2 == 0 else sides[::-1]
            for load in loads:
                bare = [NOTHING] if load.also_bare else []
                legs = _legs([*bare, *turn], load, workers, secs)
                found.setdefault(load.name, []).append(legs)
    return found


def _legs(sides: Sequence[Side], load: Load, workers: list[int], secs: float) -> dict[str, Leg]:
    legs: dict[str, Leg] = {}
    for side in sides:
        leg = legs[side.name] = run_leg(side, load, workers, secs)
        cost = f"{leg.p50_us:.0f} us p50" if leg.cpu_us is None else f"{leg.cpu_us:.1f} us of CPU"
        print(f"  {load.name} through {side.name}: {cost}", file=sys.stderr)
    return legs
