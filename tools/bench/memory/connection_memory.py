"""The memory of a connection: resident memory with many of them, minus that without.

Both are measured in the same process after a first load, so that its code and pools are not
counted; the kernel's memory for sockets is not counted, either.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from subprocess import DEVNULL, PIPE

from tools.bench.harness.load_run import LegError, Load, fake_worker, started
from tools.bench.harness.processes import raise_descriptor_limit, rss_bytes, running
from tools.bench.harness.proxies import Side

SPARE_DESCRIPTORS = 600  # the proxy's own, and its connections to workers
HELD_MS = 1500
WARM = (Load("warm", "unary", 64, warm_ms=0), Load("warm", "stream", 64, gap_ms=100, warm_ms=0))
WARMED_MS = 800


@dataclass(frozen=True, slots=True)
class ClientGroup:
    """Many connections; `each` is the proxy's number of descriptors for one of them."""

    name: str
    load: Load
    each: int


IDLE = ClientGroup("idle connection", Load("idle", "idle", 10_000, warm_ms=500), 1)
SLOW = ClientGroup("slow stream", Load("slow", "stream", 2_000, gap_ms=1000, warm_ms=1500), 2)


@dataclass(frozen=True, slots=True)
class ProcessResources:
    """A proxy's resident memory in bytes, with and without the connections."""

    group: str
    side: str
    count: int
    before_bytes: int
    with_bytes: int

    @property
    def each_bytes(self) -> float:
        return (self.with_bytes - self.before_bytes) / self.count


def fitting(group: ClientGroup, limit: int) -> ClientGroup:
    """The group, reduced to the number that `limit` descriptors allow, which is reported."""
    most = (limit - SPARE_DESCRIPTORS) // group.each
    wanted = group.load.connections
    if most >= wanted:
        return group
    if most < 1:
        raise LegError(f"{limit} descriptors are too few; the maximum is `ulimit -Hn`")
    print(
        f"bench: only {most} of {wanted} for '{group.name}': this process may have at most {limit}"
        " descriptors; raise the hard limit (ulimit -Hn)",
        file=sys.stderr,
    )
    return replace(group, load=replace(group.load, connections=most))


def held(side: Side, group: ClientGroup) -> ProcessResources:
    """Measure a group; raises LegError if a connection was refused, cut or answered wrongly."""
    with fake_worker() as workers, started(side, workers) as (port, pid):
        if pid is None:
            raise LegError("connection memory can only be measured with a proxy")
        for load in WARM:
            with running(load.argv(port, WARMED_MS), DEVNULL) as process:
                process.wait()
        before = rss_bytes(pid)
        beside = 0
        with running(group.load.argv(port, HELD_MS), PIPE) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                last = line.strip()
                if last == "window_closed":
                    beside = rss_bytes(pid)
        if process.returncode:
            raise LegError(f"{group.name} through {side.name}: {last[last.find('first_error') :]}")
    return ProcessResources(group.name, side.name, group.load.connections, before, beside)


def measure_groups(
    sides: Sequence[Side], kinds: Sequence[ClientGroup] = (IDLE, SLOW)
) -> list[ProcessResources]:
    """Measure all measure_groups with all sides. Raises LegError."""
    limit = raise_descriptor_limit()
    found = []
    for kind in kinds:
        group = fitting(kind, limit)
        for side in sides:
            one = held(side, group)
            print(f"  {one.group} through {side.name}: {one.each_bytes:.0f} bytes", file=sys.stderr)
            found.append(one)
    return found


def table(found: Sequence[ProcessResources]) -> list[list[str]]:
    rows = [["what", "through", "count", "bytes each", "MiB before", "MiB with them"]]
    rows += [
        [
            one.group, one.side, str(one.count), f"{one.each_bytes:.0f}",
            f"{one.before_bytes / 2**20:.1f}", f"{one.with_bytes / 2**20:.1f}",
        ]
        for one in found
    ]  # fmt: skip
    return rows
