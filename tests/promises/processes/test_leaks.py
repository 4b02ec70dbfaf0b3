"""Crowds of hostile clients leak nothing in the proxy."""

import gc
import os
import tracemalloc
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain

import pytest
import trio

from omni_proxy.dataplane import websocket_relay
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask
from tests.promises.support.clients import post
from tests.promises.support.dataplane_fixture import RunningDataPlane, run_dataplane
from tests.promises.support.fakes import fake_workers
from tests.promises.support.hostile import (
    ANSWERS,
    BODIES,
    HEADS,
    PROXY_HEADERS,
    QUEUED,
    SECURE,
    WEBSOCKETS,
    WORKERS,
    Hostile,
    worker,
)
from tests.promises.support.tls_helpers import listening

FIRST = 5  # clients per kind: fill what the proxy keeps permanently, such as templates of heads
CROWD = 50  # clients per kind
AT_ONCE = 50
# A connection that leaks would keep some 2,700 bytes; templates are bounded.
MAX_LEFT_BYTES = CROWD * 1000
PATIENCE_SECS = 60
TIMEOUTS = """
[server.timeouts]
client_idle_secs = 0.1
client_head_secs = 0.1
client_body_secs = 0.1
idle_secs = 0.2
response_head_secs = 0.2
[health]
failure_threshold = 1000000
[routing]
max_worker_retries = 0  # hostile workers stay in rotation for later clients
"""
ENTRY = '[[workers]]\nurl = "{}"\nmodel = "m"\n'
BALANCED = "[server]\nproxy_protocol = true\n"
NARROW = "[server]\nmax_inflight = 20\nqueue_size = 40\nqueue_timeout_secs = 0.2\n"
FAMILIES = {
    "heads": (HEADS, TIMEOUTS),
    "bodies": (BODIES, TIMEOUTS),
    "answers": (ANSWERS, TIMEOUTS),
    "workers": (WORKERS, TIMEOUTS),
    "websockets": (WEBSOCKETS, TIMEOUTS),
    "TLS": (SECURE, listening() + TIMEOUTS),
    "PROXY headers": (PROXY_HEADERS, BALANCED + TIMEOUTS),
    "the queue": (QUEUED, NARROW + TIMEOUTS),
}


@dataclass(frozen=True)
class Holdings:
    """Everything that the proxy could keep of a client."""

    descriptors: frozenset[str]  # with their targets: some of an earlier test may still be closing
    coroutines: int
    in_flight: int
    at_workers: int
    waiting: int
    held_bytes: int


def descriptors() -> frozenset[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
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
    """The number of live objects of each class that a connection has."""
    gc.collect()
    gc.collect()  # the first does not reach an error that OpenSSL keeps, and its frames
    kinds = (ConnectionTask, Stream, Exchange)
    return Counter(
        type(value).__name__ for value in gc.get_objects() if issubclass(type(value), kinds)
    )


async def settled(opened: RunningDataPlane, start: Holdings) -> None:
    """Wait until the last clients of a crowd have been closed; what remains then is a leak."""

    def kept() -> Holdings:
        now = holdings(opened)
        return replace(now, descriptors=now.descriptors - start.descriptors)

    clean = replace(start, descriptors=frozenset())
    with trio.move_on_after(PATIENCE_SECS / 4):
        while kept() != clean:
            await trio.sleep(0.02)
    assert kept() == clean


async def crowd(opened: RunningDataPlane, count: int, *kinds: Hostile) -> None:
    limiter = trio.CapacityLimiter(AT_ONCE)

    async def one(hostile: Hostile) -> None:
        async with limiter:
            try:
                async with opened.client() as client:
                    await hostile(opened, client)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the proxy or the client has closed the connection

    with trio.fail_after(PATIENCE_SECS):
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                for hostile in kinds:
                    nursery.start_soon(one, hostile)


@pytest.fixture(autouse=True)
def _no_log_records_and_short_timeouts(monkeypatch, caplog):
    """Log records would count as leaked memory."""
    caplog.set_level("CRITICAL", logger="omni_proxy")
    monkeypatch.setattr(websocket_relay, "SPEECH_CONFIG_SECS", 0.1)
    monkeypatch.setattr(websocket_relay, "CLOSE_SECS", 0.1)


@asynccontextmanager
async def unlogged_dataplane(config: str):
    async with fake_workers(worker) as (fake,):
        text = config + ENTRY.format(fake.url)
        async with run_dataplane(config=text) as opened:
            opened.dataplane.recorders.access_log = None
            yield opened


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_crowd_of_hostile_clients_leaks_nothing(family):
    kinds, config = FAMILIES[family]
    async with unlogged_dataplane(config) as opened:
        start, live = holdings(opened), objects()
        await crowd(opened, FIRST, *kinds.values())
        await settled(opened, start)
        tracemalloc.start()
        try:
            await crowd(opened, CROWD, *kinds.values())
            await settled(opened, start)
            assert objects() <= live
            kept = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        proxy_memory = kept.filter_traces([tracemalloc.Filter(True, "*/omni_proxy/*")])
        assert sum(entry.size for entry in proxy_memory.statistics("filename")) < MAX_LEFT_BYTES


async def test_good_clients_are_served_among_hostile_ones():
    plain = [kinds.values() for kinds, config in FAMILIES.values() if config == TIMEOUTS]
    # On a busy machine, a good client may be slow, too.
    patient = TIMEOUTS.replace("= 0.", "= 1.")
    async with unlogged_dataplane(patient) as opened, trio.open_nursery() as nursery:
        nursery.start_soon(crowd, opened, 3, *chain(*plain))
        for _ in range(50):
            async with opened.client() as client:
                await client.send(post())
                assert (await client.answer()).status == 200
