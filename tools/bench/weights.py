"""What new weights cost on their way: plain gloo, our receiver, and a fleet behind the proxy.

`python -m tools.bench --weights`. Every figure is a ratio within a round, whose legs ran within
seconds of each other: to a plain gloo broadcast from one process into memory that was touched. How
memory is measured, and lateness: weights_memory.py, weights_lateness.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, Any, Literal

from tools.bench import report
from tools.bench.processes import end_on_signals, running
from tools.bench.weights_fleet import PEAK, FleetError, through
from tools.bench.weights_fleet import WANTED as FLEET_WANTED
from tools.bench.weights_fleet import rows_of as fleet_rows
from tools.bench.weights_memory import watched

MIB = 1 << 20
BLOCK_MIB = 64
GROUP_SECS = 60.0
Rates = dict[str, list[float]]  # GB/s by leg, one per round


class WeightsBenchError(Exception):
    """A leg did not work; the text says what it said."""


class Sender:
    """The process that broadcasts. Orders go out at once; `heard` waits for the answer."""

    def __init__(self, process: subprocess.Popen[str], count: int, nbytes: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self.count, self.nbytes = count, nbytes
        self.order(do="blocks", count=count, nbytes=nbytes)
        self.heard()

    def order(self, **order: object) -> None:
        print(json.dumps(order), file=self._orders, flush=True)

    def heard(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise WeightsBenchError("the process that broadcasts has ended")
        told: dict[str, Any] = json.loads(line)
        return told

    def opened(self, group: str, join: Callable[[int], None]) -> None:
        """A group of two; `join` gets the port and returns when it is in."""
        self.order(do="open", group=group, world=2)
        join(int(self.heard()["port"]))
        self.heard()


@contextmanager
def sender(count: int, nbytes: int) -> Iterator[Sender]:
    argv = [sys.executable, "-m", "tools.bench.broadcaster"]
    with running(argv, subprocess.PIPE) as process:
        yield Sender(process, count, nbytes)


class Plain:
    """The yardstick: torch alone, into blocks that are there already."""

    def __init__(self, sends: Sender) -> None:
        import torch
        from torch._C._distributed_c10d import PrefixStore, TCPStore
        from torch.distributed import ProcessGroupGloo

        self._sends = sends
        self.blocks = [torch.ones(sends.nbytes, dtype=torch.uint8) for _ in range(sends.count)]
        self._group: Any = None

        def join(port: int) -> None:
            store = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
            inner = PrefixStore("cpu/", PrefixStore("plain/", PrefixStore("plain", store)))
            self._group = ProcessGroupGloo(inner, 1, 2, timedelta(seconds=GROUP_SECS))

        sends.opened("plain", join)

    def secs(self) -> float:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        started = time.perf_counter()
        self._sends.order(do="send", group="plain")
        for block in self.blocks:
            self._group.broadcast([block], options).wait()
        took = time.perf_counter() - started
        self._sends.heard()
        return took


class Ours:
    """The receiver of the replica and of the proxy."""

    def __init__(self, sends: Sender, isolation: Literal["process", "thread"]) -> None:
        from omni_proxy.collective.receiver import Limits, Rendezvous, open_receiver
        from omni_proxy.collective.specs import plans_of

        self._sends, self._name = sends, isolation
        self._receiver = open_receiver(isolation, Limits(), name=f"bench {isolation}")
        buckets = [
            {"names": [f"block-{n}"], "dtypes": ["uint8"], "shapes": [[sends.nbytes]]}
            for n in range(sends.count)
        ]
        self._plans = plans_of({"num_buckets": len(buckets), "buckets": buckets})

        def join(port: int) -> None:
            place = Rendezvous("127.0.0.1", port, 1, 2, isolation, "gloo", GROUP_SECS)
            self._receiver.init(place)

        sends.opened(isolation, join)

    def secs(self, *, digests: bool = False, into: Sequence[Any] = ()) -> float:
        """`into`: blocks of this process to which what came is copied, as a worker does."""
        armed = self._receiver.arm(self._name, self._plans, ready_secs=GROUP_SECS, digests=digests)
        started = time.perf_counter()
        self._sends.order(do="send", group=self._name)
        received = armed.wait(GROUP_SECS)
        if into:
            for block, tensor in zip(into, received.tensors().values(), strict=True):
                block.copy_(tensor)
        took = time.perf_counter() - started
        received.close()
        self._sends.heard()
        return took

    def peak_buckets(self) -> float:
        """What its processes need at most beyond what they had, hashing included."""
        with watched(lambda: self._receiver.status()["processes"], 0) as peak:
            self.secs(digests=True)
        return peak.extra_bytes / self._sends.nbytes

    def close(self) -> None:
        self._receiver.close()


def by_parts(total_mib: int, rounds: int) -> tuple[Rates, float]:
    """GB/s of memory, of plain gloo and of our receiver; and how many buckets that took at most."""
    import torch

    torch.set_num_threads(1)
    count = max(total_mib // BLOCK_MIB, 1)
    nbytes = count * BLOCK_MIB * MIB
    with sender(count, BLOCK_MIB * MIB) as sends:
        plain = Plain(sends)
        child, thread = Ours(sends, "process"), Ours(sends, "thread")
        legs: dict[str, Callable[[], float]] = {
            MEMCPY: lambda: _copied(plain.blocks),
            PLAIN: plain.secs,
            "receiver, in a child": child.secs,
            "receiver, in a thread": thread.secs,
            "receiver, with SHA-256": lambda: child.secs(digests=True),
            "receiver, shared memory, worker": lambda: child.secs(into=plain.blocks),
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
    """The rows of both modes, at a model of 538 MB; each round has its own plain gloo."""
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
    parser.add_argument("--no-fleet", action="store_true", help="the parts alone, without a model")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting burns no core
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
