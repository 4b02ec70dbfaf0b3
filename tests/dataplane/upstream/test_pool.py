from select import EPOLLIN, EPOLLOUT

import pytest

from omni_proxy.dataplane.upstream.pool import IDLE_SECS, UpstreamPool, UpstreamPools
from tests.dataplane.loop_script import Scripted, until
from tests.fleet.entries import entry, fleet_of


@pytest.fixture
def pool(loop):
    return UpstreamPool(loop, ("127.0.0.1", 1), "worker:1")


async def nothing(task):
    return


@pytest.fixture
def task(loop):
    return Scripted(loop, nothing)


async def test_the_connection_released_last_is_reused_first(loop, wires, pool, task):
    first, second = (wires.stream(task)[0] for _ in range(2))
    pool.release(first)
    pool.release(second)
    other = Scripted(loop, nothing)
    assert [pool.reuse(other), pool.reuse(other), pool.reuse(other)] == [second, first, None]
    assert first.task is second.task is other


async def test_an_idle_connection_closed_by_its_worker_is_not_reused(wires, pool, task):
    stream, peer = wires.stream(task)
    pool.release(stream)
    peer.close()
    await until(lambda: stream.closed)
    assert pool.reuse(task) is None


async def test_an_idle_connection_that_receives_bytes_is_closed(wires, pool, task):
    stream, peer = wires.stream(task)
    pool.release(stream)
    peer.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    await until(lambda: stream.closed)
    assert pool.reuse(task) is None


async def test_an_event_from_before_the_release_closes_no_idle_connection(wires, pool, task):
    """An event of a batch whose bytes another event's handler has read and released."""
    stream, peer = wires.stream(task)
    peer.send(b"whole")
    await until(lambda: stream.readable)
    assert stream.read(100) == b"whole"
    pool.release(stream)
    stream.on_event(EPOLLIN | EPOLLOUT)
    assert (pool.idle, stream.closed, stream.readable) == ([stream], False, False)
    peer.send(b"more")
    await until(lambda: stream.closed)
    assert pool.idle == []


async def test_a_released_connection_is_closed_if_it_has_ended_or_unread_bytes(wires, pool, task):
    ended, peer = wires.stream(task)
    peer.close()
    await until(lambda: ended.peer_closed)
    pool.release(ended)
    unread, peer = wires.stream(task)
    peer.send(b"more")
    await until(lambda: unread.readable)
    pool.release(unread)
    assert (ended.closed, unread.closed, pool.idle) == (True, True, [])


async def test_a_released_connection_that_may_have_more_bytes_is_kept_if_it_has_none(
    wires, pool, task
):
    stream, peer = wires.stream(task)
    peer.send(b"full")
    await until(lambda: stream.readable)
    assert (stream.read(4), stream.readable) == (b"full", True)
    pool.release(stream)
    assert (pool.reuse(task), stream.readable) == (stream, False)


async def test_a_sweep_closes_only_connections_that_were_idle_too_long(loop, wires, pool, task):
    old, recent = (wires.stream(task)[0] for _ in range(2))
    pool.release(old)
    pool.release(recent)
    old.idle_since, recent.idle_since = 100.0, 100.0 + IDLE_SECS
    loop.now = 100.0 + IDLE_SECS + 1
    pool.sweep()
    assert (old.closed, recent.closed, pool.idle) == (True, False, [recent])


async def test_a_closed_pool_keeps_nothing(wires, pool, task):
    idle, used = (wires.stream(task)[0] for _ in range(2))
    pool.release(idle)
    pool.close()
    pool.release(used)
    assert (idle.closed, used.closed, pool.reuse(task)) == (True, True, None)


async def test_the_host_line_names_the_worker(pool):
    assert pool.own_lines == b"host: worker:1\r\n"


async def test_the_pool_of_a_removed_worker_is_not_kept(loop, wires, task):
    kept, removed = fleet_of(entry("a"), entry("b")).workers
    pools = UpstreamPools(loop, "/nowhere")
    pools.on_fleet_change({kept})
    assert pools.of(kept) is pools.of(kept)
    late = pools.of(removed)  # for a request that is retried on the removed worker
    stream, _ = wires.stream(task)
    late.release(stream)
    assert stream.closed
    assert pools.of(removed) is not late
    pools.on_fleet_change({kept, removed})
    assert pools.of(removed) is pools.of(removed)
