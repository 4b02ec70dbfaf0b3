"""A pump that always has work, and what trio's other tasks get beside it."""

import socket
from threading import get_ident

import pytest
import trio

from omni_proxy.dataplane.loop import trio_scheduling
from omni_proxy.dataplane.loop.timeouts import Timers
from omni_proxy.dataplane.loop.trio_scheduling import HostLoop
from tests.dataplane.pumping import Scripted

BATCHES = 3000


class Turns(trio.abc.Instrument):
    def __init__(self):
        self.count = 0

    def before_io_wait(self, _):
        self.count += 1


@pytest.fixture(autouse=True)
def _no_turn_without_a_reason(monkeypatch):
    """Whoever waits for one in vain is not saved by the next that comes anyway."""
    monkeypatch.setattr(trio_scheduling, "AT_LEAST_SECS", 1000.0)


async def test_trio_has_no_turns_that_nobody_needs(busy):
    turns = Turns()
    busy.rings_at = busy.batches + BATCHES
    trio.lowlevel.add_instrument(turns)
    with trio.fail_after(30):
        await busy.bell.wait()
    trio.lowlevel.remove_instrument(turns)
    assert turns.count < BATCHES / 50


async def test_a_socket_of_trios_is_heard(busy):
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        busy.rings_at = busy.batches + 50

        async def speak():
            await busy.bell.wait()
            far.send(b"x")

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(speak)
                await trio.lowlevel.wait_readable(near)
        assert near.recv(1) == b"x"


async def test_a_thread_is_heard(busy):
    with trio.fail_after(30):
        assert await trio.to_thread.run_sync(get_ident) != get_ident()


async def test_a_deadline_is_kept(busy):
    before = busy.batches
    with trio.fail_after(30):
        await trio.sleep(0.02)
    assert busy.batches > before


async def test_a_pause_that_a_connection_begins_ends_in_its_time(busy, loop, nursery):
    timers = Timers(loop)
    nursery.start_soon(timers.run)

    async def script(task):
        await timers.sleep(task, 0.02)

    await trio.lowlevel.checkpoint()
    pausing = Scripted(loop, script)
    pausing.start()
    with trio.fail_after(30):
        await pausing.ended.wait()


async def test_where_trio_keeps_its_sockets_elsewhere_it_has_its_turns_blindly(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(trio_scheduling.select, "epoll", type("NotTheOne", (), {}))
        unknown = HostLoop()
    known = HostLoop()
    assert (unknown.has_events(), known.has_events()) == (True, False)
