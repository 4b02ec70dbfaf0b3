import pytest

from omni_proxy.dataplane.upstream.pool import IDLE_SECS, UpstreamPool, UpstreamPools
from tests.dataplane.loop_script import Scripted, until
from tests.fleet.entries import entry, fleet_of


@pytest.fixture
def lane(loop):
    return UpstreamPool(loop, ("127.0.0.1", 1), "worker:1")


async def nothing(task):
    return


@pytest.fixture
def task(loop):
    return Scripted(loop, nothing)


async def test_what_is_given_back_last_is_taken_first(loop, wires, lane, task):
    first, second = (wires.conn(task)[0] for _ in range(2))
    lane.release(first)
    lane.release(second)
    other = Scripted(loop, nothing)
    assert [lane.reuse(other), lane.reuse(other), lane.reuse(other)] == [second, first, None]
    assert first.task is second.task is other


async def test_an_idle_connection_that_its_worker_closes_is_never_taken(wires, lane, task):
    conn, far = wires.conn(task)
    lane.release(conn)
    far.close()
    await until(lambda: conn.closed)
    assert lane.reuse(task) is None


async def test_an_idle_connection_that_speaks_unasked_is_dropped(wires, lane, task):
    conn, far = wires.conn(task)
    lane.release(conn)
    far.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    await until(lambda: conn.closed)
    assert lane.reuse(task) is None


async def test_one_that_has_ended_or_holds_unread_bytes_is_closed_instead_of_kept(
    wires, lane, task
):
    ended, far = wires.conn(task)
    far.close()
    await until(lambda: ended.peer_closed)
    lane.release(ended)
    unread, far = wires.conn(task)
    far.send(b"more")
    await until(lambda: unread.readable)
    lane.release(unread)
    assert (ended.closed, unread.closed, lane.idle) == (True, True, [])


async def test_one_that_was_read_to_the_brim_but_is_empty_is_kept(wires, lane, task):
    conn, far = wires.conn(task)
    far.send(b"full")
    await until(lambda: conn.readable)
    assert (conn.read(4), conn.readable) == (b"full", True)
    lane.release(conn)
    assert (lane.reuse(task), conn.readable) == (conn, False)


async def test_a_sweep_closes_only_what_has_been_idle_for_too_long(loop, wires, lane, task):
    old, young = (wires.conn(task)[0] for _ in range(2))
    lane.release(old)
    lane.release(young)
    old.idle_since, young.idle_since = 100.0, 100.0 + IDLE_SECS
    loop.now = 100.0 + IDLE_SECS + 1
    lane.sweep()
    assert (old.closed, young.closed, lane.idle) == (True, False, [young])


async def test_a_closed_pool_keeps_nothing(wires, lane, task):
    idle, used = (wires.conn(task)[0] for _ in range(2))
    lane.release(idle)
    lane.close()
    lane.release(used)
    assert (idle.closed, used.closed, lane.reuse(task)) == (True, True, None)


async def test_the_host_line_names_the_worker(lane):
    assert lane.host_line == b"host: worker:1\r\n"


async def test_a_worker_that_was_removed_gets_no_pool_that_is_kept(loop, wires, task):
    stays, leaves = fleet_of(entry("a"), entry("b")).workers
    pools = UpstreamPools(loop, "/nowhere")
    pools.on_fleet_change({stays})
    assert pools.of(stays) is pools.of(stays)
    late = pools.of(leaves)  # of a request that is tried again there
    conn, _ = wires.conn(task)
    late.release(conn)
    assert conn.closed
    assert pools.of(leaves) is not late
    pools.on_fleet_change({stays, leaves})
    assert pools.of(leaves) is pools.of(leaves)
