"""python -m tools.bench.cluster.store_load: the load on a real store by the counts of many proxies.

The worst case: the number in flight at every worker changes with each publication. Each proxy is
the program's codec and connection; one of them applies the messages that it receives, the others
only read them. The store counts commands and bytes. Staleness is the time from a change at a random
moment until it is applied, in this process, which is busier than a proxy.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle

import trio

from omni_proxy.cluster.messages import CountsMessage, decode, encode, target_key
from omni_proxy.cluster.peer_counts import OwnCounts, PeerCounts
from omni_proxy.cluster_member.store_connection import RedisConnection, connected
from omni_proxy.config.tables.cluster import store_address
from tools.bench.cluster.fleet import store

PUBLISH_SECS, HEARTBEAT_SECS, TIMEOUT_SECS = 0.05, 1.25, 30
CHANNEL, MARKER = "omni:members", 0


@dataclass
class Changes:
    """The changes of the marker at the first proxy: its value and the time."""

    value: int = 0
    made_at: dict[int, float] = field(default_factory=dict)
    staleness: list[float] = field(default_factory=list)


@asynccontextmanager
async def reader(
    url: str, peers: PeerCounts | None, changes: Changes
) -> AsyncIterator[RedisConnection]:
    """A subscribed connection; without `peers`, messages are dropped."""

    def take(_: bytes, payload: bytes) -> None:
        message = decode(payload) if peers is not None else None
        if peers is None or not isinstance(message, CountsMessage):
            return
        peers.take(message, trio.current_time())
        made_at = changes.made_at.pop(message.in_flight.get(MARKER, 0), None)
        if made_at is not None:
            changes.staleness.append(trio.current_time() - made_at)

    async with connected(store_address(url), take, None, TIMEOUT_SECS) as connection:
        await connection.call(("SUBSCRIBE", CHANNEL))
        yield connection


async def publish(
    connection: RedisConnection, number: int, keys: list[int], changes: Changes
) -> None:
    """Publish like a proxy, until cancelled."""
    own, beat_at = OwnCounts(f"10.0.0.{number}:8000/0123abcd"), 0.0
    turns = cycle([dict.fromkeys(keys, count) for count in (3, 17, 90)])
    for in_flight in turns:
        if not number:
            in_flight[MARKER] = changes.value
        now = trio.current_time()
        beats = now - beat_at >= HEARTBEAT_SECS
        beat_at = now if beats else beat_at
        message = own.message(in_flight, len(keys), waits=False, whole=beats)
        if message is not None:
            lease = [("SET", f"omni:lease:{number}", "", "PX", 5000), ("TIME",)] if beats else []
            await connection.call(("PUBLISH", CHANNEL, encode(message)), *lease)
        await trio.sleep(PUBLISH_SECS)


async def change(changes: Changes) -> None:
    chance = random.Random(1)
    while True:
        await trio.sleep(chance.uniform(0.1, 0.3))
        changes.value += 100
        changes.made_at[changes.value] = trio.current_time()


async def figures(connection: RedisConnection) -> tuple[int, int, int]:
    """The store's counts: published messages, bytes read, bytes written."""
    (stats,) = await connection.call(("INFO", "stats"))
    (commands,) = await connection.call(("INFO", "commandstats"))
    published = re.search(rb"cmdstat_publish:calls=(\d+)", bytes(commands))
    net = re.findall(rb"total_net_(?:input|output)_bytes:(\d+)", bytes(stats))
    return int(published[1]) if published else 0, int(net[0]), int(net[1])


async def measure(url: str, proxies: int, workers: int, secs: float) -> None:
    keys = [target_key(f"http://10.1.{n >> 8}.{n & 255}:8000") for n in range(workers)]
    changes = Changes()
    async with (
        trio.open_nursery() as nursery,
        connected(store_address(url), _ignore, None, TIMEOUT_SECS) as info,
    ):

        async def run_proxy(number: int) -> None:
            peers = PeerCounts("the reader") if number == proxies - 1 else None
            async with reader(url, peers, changes) as connection:
                await publish(connection, number, keys, changes)

        for number in range(proxies):
            nursery.start_soon(run_proxy, number)
        nursery.start_soon(change, changes)
        await trio.sleep(1)
        before, began = await figures(info), trio.current_time()
        await trio.sleep(secs)
        after, took = await figures(info), trio.current_time() - began
        nursery.cancel_scope.cancel()
    messages, read, written = ((b - a) / took for a, b in zip(before, after, strict=True))
    late = sorted(changes.staleness)
    median, most = late[len(late) // 2], late[-1 - len(late) // 20]
    print(
        f"{workers} workers, {proxies} proxies; each: {messages / proxies:.1f} messages/s, "
        f"{read / proxies / 1000:.1f} kB/s sent, {written / proxies / 1000:.0f} kB/s received, its "
        f"own, too; {messages * proxies:.0f} deliveries/s; staleness {1000 * median:.0f} ms in the "
        f"median, {1000 * most:.0f} ms at p95"
    )


def _ignore(channel: bytes, payload: bytes) -> None:
    pass


async def until_open(url: str) -> None:
    with trio.fail_after(10):
        while True:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", store_address(url).port)
            except OSError:
                await trio.sleep(0.05)
            else:
                await stream.aclose()
                return


async def measure_all(url: str, arguments: argparse.Namespace) -> None:
    await until_open(url)
    for workers in arguments.workers:
        await measure(url, arguments.proxies, workers, arguments.secs)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.cluster.store_load", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--proxies", type=int, default=10)
    parser.add_argument("--secs", type=float, default=10.0, help="duration of each (10)")
    arguments = parser.parse_args()
    with store() as url:
        trio.run(measure_all, url, arguments)


if __name__ == "__main__":
    main()
