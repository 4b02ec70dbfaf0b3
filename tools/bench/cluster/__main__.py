"""python -m tools.bench.cluster: how even the load of three proxies is, and whether bounds hold.

Measures the spread (the maximum in flight at a worker by the mean, averaged over samples) with one
proxy, three independent proxies, and three in a cluster; then with a bound of 2 per worker.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import trio

from tools.bench.cluster.fleet import Clients, Workers, proxies, store

WORKERS, CLIENTS, PROXIES, BOUND = 8, 96, 3, 2
SAMPLE_SECS = 0.005
WARM_UP_SECS = 2.0


async def sampled(
    workers: Workers, clients: Clients, secs: float, warm_up_secs: float
) -> tuple[list[list[int]], Clients]:
    """Samples of the requests in flight at each worker, while the clients run."""
    samples = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clients.run, CLIENTS)
        await trio.sleep(warm_up_secs)
        end = trio.current_time() + secs
        while trio.current_time() < end:
            samples.append(list(workers.in_flight))
            await trio.sleep(SAMPLE_SECS)
        nursery.cancel_scope.cancel()
    return samples, clients


def spread(samples: Sequence[Sequence[int]]) -> float:
    busy = [sample for sample in samples if sum(sample)]
    return sum(max(sample) * len(sample) / sum(sample) for sample in busy) / len(busy)


async def measure(arguments: argparse.Namespace, store_url: str) -> None:
    shared = f'[cluster]\nurl = "{store_url}"\n'
    low, high = arguments.service_ms
    workers = Workers((low / 1000, high / 1000))
    async with trio.open_nursery() as nursery:
        for _ in range(WORKERS):
            await nursery.start(workers.serve)
        for name, count, more in (
            ("one proxy", 1, ""), ("three, no cluster", PROXIES, ""),
            ("three, [cluster]", PROXIES, shared),
        ):  # fmt: skip
            if arguments.only and arguments.only not in name:
                continue
            async with proxies(count, workers.urls, more) as found:
                ports = [port for port, _ in found]
                load = Clients(ports, arguments.drawn)
                samples, clients = await sampled(workers, load, arguments.secs, WARM_UP_SECS)
            print(
                f"{name:20} spread {spread(samples):.3f}, {clients.answered} answered, "
                f"{len(clients.failures)} failed"
            )
        if not arguments.only or arguments.only in "bound":
            async with proxies(PROXIES, workers.urls, shared, max_inflight=BOUND) as found:
                ports = [port for port, _ in found]
                load = Clients(ports, arguments.drawn)
                samples, clients = await sampled(workers, load, arguments.secs, 0.0)
            print(f"bound of {BOUND}, from the first request on: {describe_bound(samples)}, "
                  f"{clients.answered} answered, {len(clients.failures)} failed")  # fmt: skip
            for failure in clients.failures[:2]:
                print(failure)
        nursery.cancel_scope.cancel()


def describe_bound(samples: Sequence[Sequence[int]]) -> str:
    seen = Counter(count for sample in samples for count in sample)
    above = sum(times for count, times in seen.items() if count > BOUND) / seen.total()
    mean = sum(count * times for count, times in seen.items()) / seen.total()
    return f"at most {max(seen)}, above it in {100 * above:.2f} % of samples, mean {mean:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.cluster", description=__doc__)
    parser.add_argument("--secs", type=float, default=10.0, help="duration of a run (10)")
    parser.add_argument(
        "--service-ms", type=float, nargs=2, default=(50, 250), metavar=("LOW", "HIGH"),
        help="range of a worker's response times (50 250)",
    )  # fmt: skip
    parser.add_argument(
        "--drawn", action="store_true",
        help="choose the requests for half of the workers at random, instead of those of every "
        "third client, which all go through one proxy",
    )  # fmt: skip
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    arguments = parser.parse_args()
    with store() as store_url:
        trio.run(measure, arguments, store_url)


if __name__ == "__main__":
    main()
