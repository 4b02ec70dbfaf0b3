"""What a connection holds: resident memory with a crowd of them, less that without.

Both figures are of the same process, the first when it has been under load already, so that
neither its code nor its pools are counted; what the kernel keeps for a socket is not, either.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from subprocess import DEVNULL, PIPE

from tools.bench.harness.load_run import LegError, Load, fake_worker, started
from tools.bench.harness.processes import raise_descriptor_limit, rss_bytes, running
from tools.bench.harness.proxies import Side

SPARE_DESCRIPTORS = 600  # the proxy's own, and what it keeps to its workers
HELD_MS = 1500
WARM = (Load("warm", "unary", 64, warm_ms=0), Load("warm", "stream", 64, gap_ms=100, warm_ms=0))
WARMED_MS = 800


@dataclass(frozen=True, slots=True)
class Crowd:
    """`each` is the descriptors of the proxy for one connection."""

    name: str
    load: Load
    each: int


IDLE = Crowd("idle connection", Load("idle", "idle", 10_000, warm_ms=500), 1)
SLOW = Crowd("slow stream", Load("slow", "stream", 2_000, gap_ms=1000, warm_ms=1500), 2)


@dataclass(frozen=True, slots=True)
class ProcessResources:
    """Bytes are of resident memory."""

    crowd: str
    side: str
    count: int
    before_bytes: int
    with_bytes: int

    @property
    def each_bytes(self) -> float:
        return (self.with_bytes - self.before_bytes) / self.count


def fitting(crowd: Crowd, limit: int) -> Crowd:
    """As many as so many descriptors allow; says so where those are fewer than wanted."""
    most = (limit - SPARE_DESCRIPTORS) // crowd.each
    wanted = crowd.load.connections
    if most >= wanted:
        return crowd
    if most < 1:
        raise LegError(f"{limit} descriptors are too few to hold a crowd; `ulimit -Hn` is the most")
    print(
        f"bench: only {most} of {wanted} for '{crowd.name}': this process may have {limit}"
        " descriptors and no more; raise the hard limit (ulimit -Hn) for all",
        file=sys.stderr,
    )
    return replace(crowd, load=replace(crowd.load, connections=most))


def held(side: Side, crowd: Crowd) -> ProcessResources:
    """Raises LegError where a connection of the crowd was refused, cut or answered wrongly."""
    with fake_worker() as workers, started(side, workers) as (port, pid):
        if pid is None:
            raise LegError("a crowd needs a proxy")
        for load in WARM:
            with running(load.argv(port, WARMED_MS), DEVNULL) as process:
                process.wait()
        before = rss_bytes(pid)
        beside = 0
        with running(crowd.load.argv(port, HELD_MS), PIPE) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                last = line.strip()
                if last == "shut":
                    beside = rss_bytes(pid)
        if process.returncode:
            raise LegError(f"{crowd.name} through {side.name}: {last[last.find('first_error') :]}")
    return ProcessResources(crowd.name, side.name, crowd.load.connections, before, beside)


def crowds(sides: Sequence[Side], kinds: Sequence[Crowd] = (IDLE, SLOW)) -> list[ProcessResources]:
    """Raises LegError."""
    limit = raise_descriptor_limit()
    found = []
    for kind in kinds:
        crowd = fitting(kind, limit)
        for side in sides:
            one = held(side, crowd)
            print(f"  {one.crowd} through {side.name}: {one.each_bytes:.0f} bytes", file=sys.stderr)
            found.append(one)
    return found


def table(found: Sequence[ProcessResources]) -> list[list[str]]:
    rows = [["what", "through", "count", "bytes each", "MiB before", "MiB with them"]]
    rows += [
        [
            one.crowd, one.side, str(one.count), f"{one.each_bytes:.0f}",
            f"{one.before_bytes / 2**20:.1f}", f"{one.with_bytes / 2**20:.1f}",
        ]
        for one in found
    ]  # fmt: skip
    return rows
