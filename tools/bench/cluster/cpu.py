"""python -m tools.bench.cluster.cpu: CPU per request of a proxy with and without [cluster].

Two further proxies without requests are members of the cluster. The two legs of a pair run within
seconds of each other, so use their ratio.
"""

from __future__ import annotations

import argparse
import statistics

import trio

from tools.bench.cluster.fleet import proxies, store
from tools.bench.harness.load_run import LOADS
from tools.bench.harness.paired import measure
from tools.bench.harness.proxies import omni_command, proxy, reconfigured

LOADS_OF = ("unary c=32", "stream 17k/s")


async def compare(store_url: str, rounds: int, secs: float) -> None:
    table = f'[cluster]\nurl = "{store_url}"\n'
    alone = proxy(omni_command(), "alone")
    member = reconfigured(alone, "member", lambda text: text + table)
    loads = [load for load in LOADS if load.name in LOADS_OF]
    async with proxies(2, [], table):
        found = await trio.to_thread.run_sync(measure, [alone, member], loads, rounds, secs)
    for load, legs in found.items():
        ratios = [(leg["member"].cpu_us or 0) / (leg["alone"].cpu_us or 1) for leg in legs]
        shown = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
        print(f"{load}: member to alone {statistics.median(ratios):.3f} ({shown})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.cluster.cpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of each load (5)")
    parser.add_argument("--secs", type=float, default=4.0, help="duration of a leg (4)")
    arguments = parser.parse_args()
    with store() as store_url:
        trio.run(compare, store_url, arguments.rounds, arguments.secs)


if __name__ == "__main__":
    main()
