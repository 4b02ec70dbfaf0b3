"""After crowds of hostile clients the proxy is as it was: nothing leaks."""

import gc
import os
import tracemalloc
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain

import pytest
import trio

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask
from omni_proxy.dataplane.websocket import relay
from tests.promises.clients import post
from tests.promises.dataplane_fixture import RunningDataPlane, run_dataplane
from tests.promises.fakes import fake_workers
from tests.promises.hostile import (
    ANSWERS,
    BODIES,
    HEADS,
    INTRODUCED,
    QUEUED,
    SECURE,
    WEBSOCKETS,
    WORKERS,
    Hostile,
    worker,
)
from tests.promises.tls_helpers import listening

FIRST = 5  # of a kind: fills what is kept for good, such as templates of heads
CROWD = 50  # of a kind
AT_ONCE = 50
# Of one kind of client, what the proxy keeps of each would be some 2,700 bytes; templates are bounded.
MOST_LEFT_BYTES = CROWD * 1000
PATIENCE_SECS = 60
TIMES = """
[server.timeouts]
client_idle_secs = 0.1
client_head_secs = 0.1
client_body_secs = 0.1
idle_secs = 0.2
response_head_secs = 0.2
[health]
failure_threshold = 1000000
[routing]
max_worker_retries = 0  # hostile workers stay in, for those who come after
"""
ENTRY = '[[workers]]\nurl = "{}"\nmodel = "m"\n'
BALANCED = "[server]\nproxy_protocol = true\n"
NARROW = "[server]\nmax_inflight = 20\nqueue_size = 40\nqueue_timeout_secs = 0.2\n"
FAMILIES = {
    "heads": (HEADS, TIMES),
    "bodies": (BODIES, TIMES),
    "answers": (ANSWERS, TIMES),
    "workers": (WORKERS, TIMES),
    "websockets": (WEBSOCKETS, TIMES),
    "TLS": (SECURE, listening() + TIMES),
    "introductions": (INTRODUCED, BALANCED + TIMES),
    "the queue": (QUEUED, NARROW + TIMES),
}


@dataclass(frozen=True)
class Holdings:
    """All that the proxy could have kept of a client."""

    descriptors: frozenset[str]  # by what they are: an earlier test's may still be closing
    coroutines: int
    in_flight: int
    at_workers: int
    waiting: int
    held_bytes: int


def descriptors() -> frozenset[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of the listing itself
            found.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return frozenset(found)


def holdings(opened: RunningDataPlane) -> Holdings:
    dataplane = opened.dataplane
    return Holdings(
        descriptors=descriptors(),
        coroutines=len(dataplane.loop.tasks),
        in_flight=dataplane.in_flight,
        at_workers=sum(worker.in_flight for worker in opened.fleet.workers),
        waiting=dataplane.queue.waiting,
        held_bytes=dataplane.inflight.held_bytes,
    )


def objects() -> Counter[str]:
    """Those that a connection has, by class, wherever they are kept."""
    gc.collect()
    gc.collect()  # an error that OpenSSL keeps, and so its frames, is out of the first's sight
    kinds = (ConnectionTask, Stream, Exchange)
    return Counter(
        type(each).__name__ for each in gc.get_objects() if issubclass(type(each), kinds)
    )


async def settled(opened: RunningDataPlane, start: Holdings) -> None:
    """The last of a crowd may still be leaving; what stays is a leak."""

    def kept() -> Holdings:
        now = holdings(opened)
        return replace(now, descriptors=now.descriptors - start.descriptors)

    clean = replace(start, descriptors=frozenset())
    with trio.move_on_after(PATIENCE_SECS / 4):
        while kept() != clean:
            await trio.sleep(0.02)
    assert kept() == clean


async def crowd(opened: RunningDataPlane, count: int, *kinds: Hostile) -> None:
    places = trio.CapacityLimiter(AT_ONCE)

    async def one(hostile: Hostile) -> None:
        async with places:
            try:
                async with opened.client() as client:
                    await hostile(opened, client)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the proxy has cut it, or it itself

    with trio.fail_after(PATIENCE_SECS):
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                for hostile in kinds:
                    nursery.start_soon(one, hostile)


@pytest.fixture(autouse=True)
def _quiet_and_quick(monkeypatch, caplog):
    """Log records would count as memory that is kept."""
    caplog.set_level("CRITICAL", logger="omni_proxy")
    monkeypatch.setattr(relay, "CONFIG_SECS", 0.1)
    monkeypatch.setattr(relay, "CLOSE_SECS", 0.1)


@asynccontextmanager
async def open_to_all(config: str):
    async with fake_workers(worker) as (made,):
        text = config + ENTRY.format(made.url)
        async with run_dataplane(config=text) as opened:
            opened.dataplane.recorders.access_log = None
            yield opened


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_crowd_leaves_nothing_behind(family):
    kinds, config = FAMILIES[family]
    async with open_to_all(config) as opened:
        start, living = holdings(opened), objects()
        await crowd(opened, FIRST, *kinds.values())
        await settled(opened, start)
        tracemalloc.start()
        try:
            await crowd(opened, CROWD, *kinds.values())
            await settled(opened, start)
            assert objects() <= living
            kept = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        ours = kept.filter_traces([tracemalloc.Filter(True, "*/omni_proxy/*")])
        assert sum(each.size for each in ours.statistics("filename")) < MOST_LEFT_BYTES


async def test_good_clients_are_served_within_a_crowd_of_all_kinds():
    plain = [kinds.values() for kinds, config in FAMILIES.values() if config == TIMES]
    # A good client may be slow as well, where a machine has much to do.
    patient = TIMES.replace("= 0.", "= 1.")
    async with open_to_all(patient) as opened, trio.open_nursery() as nursery:
        nursery.start_soon(crowd, opened, 3, *chain(*plain))
        for _ in range(50):
            async with opened.client() as client:
                await client.send(post())
                assert (await client.answer()).status == 200
