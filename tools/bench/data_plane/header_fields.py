"""The cost of a header field whose value is new in every request.

Compares 32 clients with and without the field; the two legs of a round run within seconds of each
other.
"""

import sys
from dataclasses import dataclass

from tools.bench.harness import report
from tools.bench.harness.load_run import Load, fake_worker, run_leg
from tools.bench.harness.proxies import Side

WITHOUT = Load("without", "unary", 32)
WITH = Load("with a new field in each", "unique", 32)


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU per request in microseconds, one for each round; `ratios` are within a round."""

    with_field: list[float]
    without: list[float]
    ratios: list[float]
    faults: list[str]


def new_field(side: Side, rounds: int, secs: float) -> Costs:
    """Raises LegError, BuildError."""
    reported: list[report.Round] = []  # by the load's name
    with fake_worker() as workers:
        for number in range(rounds):
            turn = (WITHOUT, WITH) if number % 2 == 0 else (WITH, WITHOUT)
            legs = {load.name: run_leg(side, load, workers, secs) for load in turn}
            reported.append(legs)
            costs = ", ".join(f"{name} {leg.cpu_us:.1f} us" for name, leg in legs.items())
            print(f"  round {number + 1}: {costs}", file=sys.stderr)
    return Costs(
        report.costs(reported, WITH.name),
        report.costs(reported, WITHOUT.name),
        report.ratios(reported, WITH.name, WITHOUT.name),
        report.faults({"fields": reported}),
    )
