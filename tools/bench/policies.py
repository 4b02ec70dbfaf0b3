"""What a policy and a large fleet cost: the proxy beside itself, CPU per small POST.

`python -m tools.bench.policies`: cache_aware by round_robin, and 500 workers by 2, each pair taken
within seconds of each other.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from tools.bench import report
from tools.bench.build import BuildError
from tools.bench.legs import LOADS, LegError, fake_worker, run_leg
from tools.bench.sides import OMNI_PROXY, Place, Side, proxy

MANY = 500
FEW = 2
LOAD = "unary c=32"


def side(policy: str, workers: int) -> Side:
    """The proxy with this policy over the first so many workers."""
    inner = proxy(OMNI_PROXY, f"{policy}, {workers} workers")
    assert inner.command is not None
    command = inner.command

    def narrowed(place: Place) -> list[str]:
        argv = command(replace(place, workers=place.workers[:workers]))
        config = place.folder / "omni-proxy.toml"
        text = config.read_text().replace('policy = "least_request"', f'policy = "{policy}"')
        config.write_text(text)
        return argv

    return replace(inner, command=narrowed)


def compared(pair: tuple[Side, Side], rounds: int, secs: float, ports: Sequence[int]) -> str:
    load = next(load for load in LOADS if load.name == LOAD)
    told: list[report.Round] = []
    for number in range(rounds):
        order = pair if number % 2 == 0 else pair[::-1]
        legs = {each.name: run_leg(each, load, list(ports), secs) for each in order}
        told.append(legs)
        costs = ", ".join(f"{name} {leg.cpu_us:.1f} us" for name, leg in legs.items())
        print(f"  round {number + 1}: {costs}", file=sys.stderr)
    first, second = pair
    found = report.spread(report.ratios(told, first.name, second.name), 2)
    faults = report.faults({LOAD: told})
    return "\n".join([f"{first.name} by {second.name}: {found}", *faults])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.policies", description=__doc__)
    parser.add_argument("--rounds", type=int, choices=range(1, 31), metavar="1..30", default=5)
    parser.add_argument("--secs", type=float, default=3.0, help="measured per leg (3)")
    arguments = parser.parse_args()
    pairs = (
        (side("cache_aware", FEW), side("round_robin", FEW)),
        (side("round_robin", MANY), side("round_robin", FEW)),
        (side("cache_aware", MANY), side("cache_aware", FEW)),
    )
    try:
        with fake_worker(MANY) as ports:
            for pair in pairs:
                print(compared(pair, arguments.rounds, arguments.secs, ports), flush=True)
    except (LegError, BuildError) as error:
        print(f"tools.bench.policies: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
