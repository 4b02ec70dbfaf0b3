from math import inf

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.health.engine_pages import METRICS, SERVER_INFO, EnginePages, PageReader
from omni_proxy.upstream_http.client import CallResult
from tests.fleet.entries import NOW, entry, fleet_of, heal


class Engine:
    """Records the paths of calls in `calls`; each call waits for `gate`, which is open at first."""

    def __init__(self):
        self.calls, self.status = [], 200
        self.gate = trio.Event()
        self.gate.set()

    async def call(self, worker, call):
        self.calls.append(call.target)
        number = len(self.calls)
        await self.gate.wait()
        await trio.lowlevel.checkpoint()
        return CallResult(None, self.status, b"%d" % number, "", 0.0)


class Reader(PageReader):
    """Fetches `pages` one after the other; `read_bodies` are the bodies received."""

    def __init__(self, *pages, refresh_secs=inf):
        self.pages, self.refresh_secs = pages, refresh_secs
        self.wanted = True
        self.read_bodies, self.ended = [], 0

    def wants(self, worker):
        return self.wanted

    async def read(self, worker, fetch):
        for page in self.pages:
            result = await fetch(page)
            self.read_bodies.append(int(result.body))
        return result.ok

    def end(self, worker):
        self.ended += 1


@pytest.fixture
def engine():
    return Engine()


async def start_pages(nursery, engine, *readers):
    fleet = fleet_of(entry("a"), healthy=False)
    pages = EnginePages(fleet, readers, engine.call)
    await nursery.start(pages.run)
    return fleet, fleet.workers[0], pages


async def test_readers_that_need_the_same_page_at_once_share_one_call(nursery, engine):
    first, second = Reader(SERVER_INFO), Reader(SERVER_INFO, METRICS)
    fleet, worker, _ = await start_pages(nursery, engine, first, second)
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    assert engine.calls == ["/server_info?config_format=json", "/metrics"]
    assert (first.read_bodies, second.read_bodies) == ([1], [1, 2])


async def test_a_page_that_was_requested_before_a_change_is_not_used(nursery, engine):
    engine.gate = trio.Event()
    reader = Reader(SERVER_INFO)
    fleet, worker, _ = await start_pages(nursery, engine, reader)
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    fleet.cache_cleared(worker)
    await wait_all_tasks_blocked()
    engine.gate.set()
    await wait_all_tasks_blocked()
    assert (len(engine.calls), reader.read_bodies, reader.ended) == (2, [2], 1)


@pytest.mark.parametrize("index", [0, 1])
async def test_a_restarted_reader_does_not_lose_the_page_of_another(nursery, engine, index):
    engine.gate = trio.Event()
    readers = Reader(SERVER_INFO), Reader(SERVER_INFO)  # either may make the call
    fleet, worker, pages = await start_pages(nursery, engine, *readers)
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    nursery.start_soon(pages.refresh, readers[index])
    await wait_all_tasks_blocked()
    engine.gate.set()
    await wait_all_tasks_blocked()
    assert [len(reader.read_bodies) for reader in readers] == [1, 1]
    assert readers[index].read_bodies[0] > 1


async def test_a_reader_that_no_longer_wants_a_worker_gets_no_page_of_it(nursery, engine):
    engine.gate = trio.Event()
    reader = Reader(SERVER_INFO)
    fleet, worker, _ = await start_pages(nursery, engine, reader)
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    reader.wanted = False
    engine.gate.set()
    await wait_all_tasks_blocked()
    assert (reader.read_bodies, reader.ended) == ([], 1)


async def test_a_removed_worker_is_not_called_again(nursery, engine, autojump_clock):
    reader = Reader(METRICS, refresh_secs=5)
    fleet, worker, _ = await start_pages(nursery, engine, reader)
    heal(fleet, worker)
    await trio.sleep(11)
    assert len(engine.calls) == 3
    fleet.apply([], NOW)
    await trio.sleep(60)
    assert (len(engine.calls), reader.ended) == (3, 1)


async def test_failed_reads_are_repeated_with_backoff_and_successful_ones_refreshed(
    nursery, engine, autojump_clock
):
    engine.status = 500
    reader = Reader(METRICS, refresh_secs=100)
    fleet, worker, _ = await start_pages(nursery, engine, reader)
    heal(fleet, worker)
    await trio.sleep(8)  # at 0, 1, 3, 7
    assert len(engine.calls) == 4
    engine.status = 200
    await trio.sleep(60)
    assert len(engine.calls) == 5
    await trio.sleep(100)
    assert len(engine.calls) == 6


async def test_a_refresh_without_a_healthy_worker_ends_at_once(nursery, engine):
    reader = Reader(METRICS)
    _, _, pages = await start_pages(nursery, engine, reader)
    with trio.fail_after(20):
        await pages.refresh(reader)
    assert engine.calls == []


@pytest.mark.parametrize("status", [200, 500, None], ids=["succeeded", "failed", "no response"])
async def test_a_refresh_ends_when_its_call_has_ended(nursery, engine, status):
    reader = Reader(METRICS)
    fleet, worker, pages = await start_pages(nursery, engine, reader)
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    engine.gate, engine.status = trio.Event(), status
    refreshed = trio.Event()

    async def refresh():
        await pages.refresh(reader)
        refreshed.set()

    nursery.start_soon(refresh)
    await wait_all_tasks_blocked()
    assert not refreshed.is_set()
    engine.gate.set()
    with trio.fail_after(20):
        await refreshed.wait()
    assert reader.read_bodies == [1, 2]


async def test_each_reader_is_ended_with_the_service(engine):
    engine.gate = trio.Event()
    reader = Reader(METRICS)
    async with trio.open_nursery() as nursery:
        fleet, worker, _ = await start_pages(nursery, engine, reader)
        heal(fleet, worker)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert reader.ended == 1
    fleet.cache_cleared(worker)  # nothing runs: no call, no error
    assert len(engine.calls) == 1
