"""When a busy event loop lets trio run its other tasks and poll for I/O."""

import socket
from threading import get_ident
from time import monotonic

import pytest
import trio

from omni_proxy.dataplane.loop import trio_scheduling
from omni_proxy.dataplane.loop.timers import Timers
from omni_proxy.dataplane.loop.trio_scheduling import TrioActivity
from tests.dataplane.loop_script import Scripted

BATCHES = 3000


class Turns(trio.abc.Instrument):
    def __init__(self):
        self.count = 0

    def before_io_wait(self, _):
        self.count += 1


@pytest.fixture(autouse=True)
def _no_regular_turns(monkeypatch):
    """The regular turns would hide that another one is missing."""
    monkeypatch.setattr(trio_scheduling, "MAX_TRIO_WAIT_SECS", 1000.0)


async def test_trio_gets_no_turn_that_it_does_not_need(busy):
    turns = Turns()
    busy.rings_at = busy.batches + BATCHES
    trio.lowlevel.add_instrument(turns)
    with trio.fail_after(30):
        await busy.bell.wait()
    trio.lowlevel.remove_instrument(turns)
    assert turns.count < BATCHES / 50


async def test_a_ready_socket_gives_trio_a_turn(busy):
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        busy.rings_at = busy.batches + 50

        async def send():
            await busy.bell.wait()
            far.send(b"x")

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await trio.lowlevel.wait_readable(near)
        assert near.recv(1) == b"x"


async def test_a_finished_thread_gives_trio_a_turn(busy):
    with trio.fail_after(30):
        assert await trio.to_thread.run_sync(get_ident) != get_ident()


async def test_an_expiring_deadline_gives_trio_a_turn(busy):
    before = busy.batches
    with trio.fail_after(30):
        await trio.sleep(0.02)
    assert busy.batches > before


async def test_a_sleep_that_a_connection_task_starts_ends_in_time(busy, loop, nursery):
    timers = Timers(loop)
    nursery.start_soon(timers.run)

    async def script(task):
        await timers.sleep(task, 0.02)

    await trio.lowlevel.checkpoint()
    pausing = Scripted(loop, script)
    pausing.start()
    with trio.fail_after(30):
        await pausing.ended.wait()


async def test_without_trios_private_epoll_it_always_gets_turns(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(trio_scheduling.select, "epoll", type("AnotherEpoll", (), {}))
        unknown = TrioActivity(monotonic)
    known = TrioActivity(monotonic)
    assert (unknown.has_events(), known.has_events()) == (True, False)
