"""Turns of the event loop while engines publish: `python -m tools.bench.cache.kv_stream`.

When the index is full, eight publishers in a separate process send 10,000 events a second over
ZeroMQ, a removal for each store. The proxy's subscriber process decodes them; this process has the
proxy's event loop, follower and index. Prints the CPU time of the loop's turns, which doesn't
depend on other programs, and the memory per block of both processes. There are no bounds.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import trio
import zmq

from omni_proxy.fleet.registry import Fleet
from omni_proxy.kv_events.event_follower import EventFollower
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.engine_blocks import PackedChanges, unpack_changes
from tools.bench.kv_events import BLOCK, fleet

WORKERS, EVENT_BLOCKS = 8, 4
TICK_SECS = 0.01
PAYLOADS = 64  # that each publisher's events are made from
LONG_SECS = 0.005


class Publisher:
    """An engine with a full cache: each stored block evicts the oldest one."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], blocks: int) -> None:
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        chance = random.Random(self.port)
        self._names: deque[list[int]] = deque()
        self._number = self._last_name = 0
        self._blocks = blocks
        width = BLOCK * EVENT_BLOCKS
        self._tokens = [
            [chance.randrange(150_000) for _ in range(width - 1)] for _ in range(PAYLOADS)
        ]

    def fill(self) -> None:
        self._send([{"type": "AllBlocksCleared"}])
        while len(self._names) * EVENT_BLOCKS < self._blocks:
            self._send([self._stored() for _ in range(64)])

    def step(self, stored: int) -> None:
        """Publish one batch with `stored` store events and as many removals."""
        batch: list[object] = []
        for _ in range(stored):
            batch += [self._stored(), {"type": "BlockRemoved", "medium": "GPU",
                                       "block_hashes": self._names.popleft()}]  # fmt: skip
        if batch:
            self._send(batch)

    def _stored(self) -> dict[str, object]:
        self._last_name += EVENT_BLOCKS
        names = [self._last_name * 0x9E3779B97F4A7C15 + each & (1 << 64) - 1 for each in range(4)]
        self._names.append(names)
        tokens = [self._last_name % (1 << 31), *self._tokens[self._number % PAYLOADS]]
        return {
            "type": "BlockStored", "block_hashes": names, "parent_block_hash": None,
            "token_ids": tokens, "block_size": BLOCK, "medium": "GPU",
        }  # fmt: skip

    def _send(self, events: list[object]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1


def publish(rate: float, blocks: int) -> None:
    """Publish until ended.

    Protocol: writes its ports, reads a line when the subscriptions are active, writes a line when
    the caches are full, and reads a line that starts the events.
    """
    with zmq.Context() as context:
        publishers = [Publisher(context, blocks) for _ in range(WORKERS)]
        print(*(each.port for each in publishers), flush=True)
        sys.stdin.readline()
        for each in publishers:
            each.fill()
        print("full", flush=True)
        sys.stdin.readline()
        due, owed = time.monotonic(), 0.0
        while True:
            time.sleep(max(0.0, due - time.monotonic()))  # noqa: TID251 - no loop here
            due += TICK_SECS
            owed += rate * TICK_SECS / WORKERS / 2
            for each in publishers:
                each.step(int(owed))
            owed -= int(owed)


class Turns(trio.abc.Instrument):
    """CPU seconds of each turn of the loop, from one wait for I/O to the next."""

    def __init__(self) -> None:
        self.secs: list[float] = []
        self._begun = 0.0

    def after_io_wait(self, timeout: float) -> None:
        self._begun = time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        if self._begun:
            self.secs.append(time.thread_time() - self._begun)


class Follower:
    """The proxy's follower and its index."""

    def __init__(self, ports: list[int]) -> None:
        self.fleet = Fleet()
        specs = [
            replace(worker.spec, kv_events=f"tcp://127.0.0.1:{port}")
            for worker, port in zip(fleet(), ports, strict=True)
        ]
        self.fleet.apply(specs, datetime.now(UTC))
        self.index = BlockIndex()
        self.follower = EventFollower(self.fleet, self._apply, lambda: 1 << 30)
        self.changed = 0

    def _apply(self, url: str, changes: PackedChanges) -> None:
        self.changed += sum(len(values) for _, values in changes) // 8
        self.index.apply(url, unpack_changes(changes))


@contextmanager
def publishing(rate: float, blocks: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start the publishing process; yields it and its ports."""
    words = ["--publish", "--rate", str(rate), "--blocks", str(blocks)]
    program = [sys.executable, "-m", "tools.bench.cache.kv_stream", *words]
    with subprocess.Popen(program, stdin=-1, stdout=-1, text=True, bufsize=1) as process:
        assert process.stdout is not None
        try:
            yield process, [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


def resident(pid: int | str) -> int:
    """Resident memory in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def children() -> list[int]:
    lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for pids in lists for pid in pids.split()]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - nothing tells it
        await trio.sleep(0.05)


async def measure(rate: float, secs: float, blocks: int) -> None:
    turns = Turns()
    with publishing(rate, blocks) as (publisher, ports):
        assert publisher.stdin is not None
        assert publisher.stdout is not None
        follower = Follower(ports)
        async with trio.open_nursery() as nursery:
            await nursery.start(follower.follower.run)
            await until(lambda: all("nothing" in w.kv_reason for w in follower.fleet.workers))
            await trio.sleep(1)  # until the subscriptions are active
            (subscriber,) = set(children()) - {publisher.pid}
            before = resident("self"), resident(subscriber)
            trio.lowlevel.add_instrument(turns)
            publisher.stdin.write("\n")
            await trio.to_thread.run_sync(publisher.stdout.readline)
            await until(lambda: follower.index.blocks >= WORKERS * blocks)
            report("the caches are reported", turns)
            held = follower.index.blocks
            own = (resident("self") - before[0]) / held
            its = (resident(subscriber) - before[1]) / held
            print(f"  {held} blocks; bytes for each: {own:.0f} here, {its:.0f} in the subscriber")
            turns.secs.clear()
            follower.changed = 0
            publisher.stdin.write("\n")
            begun = time.monotonic()
            await trio.sleep(secs)
            events = follower.changed / EVENT_BLOCKS / (time.monotonic() - begun)
            report(f"{events:.0f} events a second", turns)
            nursery.cancel_scope.cancel()


def report(name: str, turns: Turns) -> None:
    secs = sorted(turns.secs)
    late = sum(each > LONG_SECS for each in secs)
    print(
        f"{name}: {len(secs)} turns, p99 {secs[len(secs) * 99 // 100] * 1e3:.2f} ms, "
        f"longest {secs[-1] * 1e3:.2f} ms, {late} above {LONG_SECS * 1e3:g} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the event loop while engines publish.")
    add = parser.add_argument
    add("--rate", type=float, default=10_000, metavar="R", help="events a second (10000)")
    add("--secs", type=float, default=10, metavar="S", help="duration (10)")
    add("--blocks", type=int, default=62_500, metavar="N", help="blocks per engine (62500)")
    add("--publish", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.publish:
        publish(arguments.rate, arguments.blocks)
    else:
        trio.run(measure, arguments.rate, arguments.secs, arguments.blocks)


if __name__ == "__main__":
    main()
