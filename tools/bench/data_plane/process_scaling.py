"""Requests per second of several data-plane processes, compared with one, measured in turn.

There are as many load generators and workers as data-plane processes, so that these are not the
bottleneck; all of them share the cores.
"""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from subprocess import PIPE

from tools.bench.harness.load_run import LegError, Load, fake_worker, started
from tools.bench.harness.processes import running
from tools.bench.harness.proxies import Side, reconfigured

PUSH = Load("unary c=64", "unary", 64)
WORKERS_EACH = 4


@dataclass(frozen=True, slots=True)
class ScalingResult:
    """Requests per second with one and with many processes, a pair for each round."""

    processes: int
    many_per_sec: list[float]
    one_per_sec: list[float]

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.many_per_sec, self.one_per_sec, strict=True)
        return [many / one for many, one in pairs]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def cores_allow(processes: int) -> bool:
    """Whether there is a core for each data-plane process, load generator and worker."""
    return cores() >= 3 * processes


def with_processes(ours: Side, processes: int) -> Side:
    line = f"[server]\nprocesses = {processes}"
    name = f"{ours.name}, processes = {processes}"
    return reconfigured(ours, name, lambda text: text.replace("[server]", line, 1))


def measure_scaling(ours: Side, processes: int, rounds: int, secs: float) -> ScalingResult:
    """Raises LegError."""
    sides = [with_processes(ours, processes), with_processes(ours, 1)]
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            per_sec = _pushed(side, processes, secs)
            print(f"  {side.name}: {per_sec:.0f} requests a second", file=sys.stderr)
            found[side.name].append(per_sec)
    many, one = found.values()
    return ScalingResult(processes, many, one)


def _pushed(side: Side, generators: int, secs: float) -> float:
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(generators):
            ports += stack.enter_context(fake_worker(WORKERS_EACH))
        port, _ = stack.enter_context(started(side, ports))
        argv = PUSH.argv(port, round(1000 * secs))
        loads = [stack.enter_context(running(argv, PIPE)) for _ in range(generators)]
        total = 0.0
        for load in loads:
            reported = load.communicate()[0].splitlines()
            seen = json.loads(reported[-1]) if reported and reported[-1].startswith("{") else {}
            if seen.get("errors", 1):
                reason = seen.get("first_error", "it ended early")
                raise LegError(f"a load generator through {side.name}: {reason}")
            total += seen["per_sec"]
    return total
