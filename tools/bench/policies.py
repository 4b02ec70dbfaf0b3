"""The cost of a policy, of a large fleet and of metrics, compared within the proxy.

`python -m tools.bench.policies`: CPU per small POST or streamed event of cache_aware by
round_robin, of 500 workers by 2, of metrics on by off; the legs of a pair run within seconds of
each other.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from tools.bench.harness import report
from tools.bench.harness.build import BuildError
from tools.bench.harness.load_run import LOADS, LegError, fake_worker, run_leg
from tools.bench.harness.processes import end_on_signals
from tools.bench.harness.proxies import OMNI_PROXY, Side, proxy, reconfigured

MANY = 500
FEW = 2
UNARY, STREAM = "unary c=32", "stream 17k/s"


def side(policy: str, workers: int, *, metrics: bool = True, rules: str = "") -> Side:
    """The proxy with this policy and the first `workers` workers; `rules` are for cache_aware."""
    counted = "" if metrics else ", metrics off"
    name = f"{policy}, {workers} workers{counted}" + (f", {rules}" if rules else "")

    def changed(text: str) -> str:
        text = text.replace('policy = "least_request"', f'policy = "{policy}"')
        text = text.replace("[server]", f"[server]\nmetrics = {str(metrics).lower()}")
        return text.replace("[[workers]]", f"[routing.cache_aware]\n{rules}\n[[workers]]", 1)

    inner = reconfigured(proxy(OMNI_PROXY, name), name, changed)
    return replace(inner, max_workers=workers)


Pair = tuple[str, Side, Side]
PAIRS: dict[str, Pair] = {
    "cache": (UNARY, side("cache_aware", FEW), side("round_robin", FEW)),
    "feedback": (
        UNARY,
        side("cache_aware", FEW),
        side("cache_aware", FEW, rules="feedback = false"),
    ),
    "cost": (
        UNARY,
        side("cache_aware", FEW, rules='score = "cost"'),
        side("cache_aware", FEW),
    ),
    "many": (UNARY, side("round_robin", MANY), side("round_robin", FEW)),
    "many-cache": (UNARY, side("cache_aware", MANY), side("cache_aware", FEW)),
    "metrics": (UNARY, side("least_request", 8), side("least_request", 8, metrics=False)),
    "metrics-stream": (STREAM, side("least_request", 8), side("least_request", 8, metrics=False)),
}


def measured_rounds(
    pair: Pair, rounds: int, secs: float, ports: Sequence[int]
) -> list[report.Round]:
    rounds_of_legs: list[report.Round] = []
    load = next(load for load in LOADS if load.name == pair[0])
    for number in range(rounds):
        order = pair[1:] if number % 2 == 0 else pair[:0:-1]
        legs = {each.name: run_leg(each, load, list(ports), secs) for each in order}
        rounds_of_legs.append(legs)
        costs = ", ".join(f"{name} {leg.cpu_us:.1f} us" for name, leg in legs.items())
        print(f"  round {number + 1}: {costs}", file=sys.stderr)
    return rounds_of_legs


def rounds_of(
    pair: Pair, rounds: int, secs: float, ports: Sequence[int]
) -> tuple[list[float], list[str]]:
    """CPU of the first side by that of the second, one for each round; and the errors."""
    rounds_of_legs = measured_rounds(pair, rounds, secs, ports)
    name, first, second = pair
    return report.ratios(rounds_of_legs, first.name, second.name), report.faults(
        {name: rounds_of_legs}
    )


def compared(pair: Pair, rounds: int, secs: float, ports: Sequence[int]) -> str:
    """The ratios, and the ratio of the best legs: other programs can only add to a leg."""
    rounds_of_legs = measured_rounds(pair, rounds, secs, ports)
    name, first, second = pair
    found = report.spread(report.ratios(rounds_of_legs, first.name, second.name), 2)
    least = [min(report.costs(rounds_of_legs, each.name), default=0.0) for each in (first, second)]
    best = f", best by best {least[0] / least[1]:.2f}" if all(least) else ""
    faults = report.faults({name: rounds_of_legs})
    return "\n".join([f"{name}: {first.name} by {second.name}: {found}{best}", *faults])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.policies", description=__doc__)
    parser.add_argument("--rounds", type=int, choices=range(1, 31), metavar="1..30", default=5)
    parser.add_argument("--secs", type=float, default=3.0, help="duration of a leg (3)")
    parser.add_argument("--pair", choices=PAIRS, action="append", help="may be repeated (all)")
    arguments = parser.parse_args()
    end_on_signals()
    pairs = [PAIRS[name] for name in arguments.pair or PAIRS]
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
