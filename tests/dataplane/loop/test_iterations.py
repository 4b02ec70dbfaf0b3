"""How much the event loop does in one iteration, and what it leaves to the next one."""

import socket
from select import EPOLLOUT

import pytest
import trio
import trio.lowlevel
import trio.testing

from omni_proxy.dataplane.loop.event_loop import (
    CHECK_EVENTS,
    MAX_BATCH_SECS,
    MAX_EVENTS,
    MAX_PENDING_WRITERS,
    EventLoop,
    IoHandler,
)
from omni_proxy.dataplane.loop.stream import Stream
from tests.dataplane.loop_script import Scripted
from tests.dataplane.manual_clock import ManualClock


async def test_trio_gets_a_turn_when_more_streams_are_ready_than_fit_in_an_iteration(loop, wires):
    stepped, started = [], trio.Event()

    async def script(task):
        await task.wait_for(task.ends[0])
        stepped.append(task)
        started.set()

    tasks = [Scripted(loop, script) for _ in range(4 * MAX_EVENTS)]
    for task in tasks:
        task.ends = wires.stream(task)
        task.start()
    await trio.testing.wait_all_tasks_blocked(0.01)
    for task in tasks:
        task.ends[1].send(b"x")
    await started.wait()
    assert len(stepped) <= 2 * MAX_EVENTS
    for task in tasks:
        await task.ended.wait()


class Timed(IoHandler):
    """Counts its events; each takes `secs` by the clock of the loop."""

    def __init__(self, loop, secs):
        self.loop, self.secs, self.events = loop, secs, 0
        self.then = None
        self.near, self.peer = socket.socketpair()
        # A new socket is writable, which is its first event.
        loop.register(self.near.fileno(), self)

    def on_event(self, mask):
        self.loop.clock.now += self.secs
        self.events += 1
        if self.then is not None:
            self.then()

    def close(self):
        self.peer.close()
        if self.near.fileno() >= 0:
            self.loop.unregister(self.near.fileno(), self.near)


@pytest.fixture
async def timed(nursery):
    """`timed(secs)` creates a handler in a loop whose clock only handlers advance."""
    loop, handlers = EventLoop(ManualClock()), []

    def make(secs):
        handlers.append(Timed(loop, secs))
        return handlers[-1]

    make.loop = loop
    await nursery.start(loop.run)
    yield make
    for handler in handlers:
        handler.close()
    loop.flush()


@pytest.mark.parametrize("secs", [MAX_BATCH_SECS / 2, 0.0])
async def test_a_long_iteration_ends_before_all_its_events_are_handled(timed, secs):
    handlers = [timed(secs) for _ in range(4 * CHECK_EVENTS)]
    steps, before = [], 0
    while before < len(handlers):
        await trio.lowlevel.checkpoint()
        handled = sum(handler.events for handler in handlers)
        steps.append(handled - before)
        before = handled
    if secs:  # trio runs tasks in random order, so two iterations may follow each other
        assert max(steps) <= 2 * CHECK_EVENTS
    else:
        assert max(steps) == len(handlers)
    assert {handler.events for handler in handlers} == {1}


@pytest.mark.parametrize("by", ["events", "tasks"])
def test_a_long_iteration_sends_before_its_end(by):
    loop = EventLoop(ManualClock())
    count = 2 * MAX_PENDING_WRITERS
    pairs, sent_before = [socket.socketpair() for _ in range(count)], []

    class Writer(IoHandler):
        waiting_on = None

        def __init__(self, sock):
            self.stream = Stream(loop, sock, None)

        def step(self):
            earlier = writers[: len(sent_before)]
            sent_before.append(sum(not writer.stream.pending for writer in earlier))
            self.stream.write_soon(b"x")

        def on_event(self, mask):
            self.step()

    for near, _ in pairs:
        near.setblocking(False)
    writers = [Writer(near) for near, _ in pairs]
    try:
        if by == "events":
            for writer in writers:
                loop._handlers[writer.stream.sock.fileno()] = writer
            loop._run_batch([(near.fileno(), EPOLLOUT) for near, _ in pairs])
        else:
            for writer in writers:
                loop.call_soon(writer)
            loop._run_batch([])
        assert len(sent_before) == count
        at = [index for index, sent in enumerate(sent_before) if sent]
        assert MAX_PENDING_WRITERS <= at[0] <= MAX_PENDING_WRITERS + CHECK_EVENTS
        assert [peer.recv(2) for _, peer in pairs] == [b"x"] * count
    finally:
        for near, peer in pairs:
            near.close()
            peer.close()
        loop.flush()


@pytest.mark.parametrize("how", ["its descriptor is another socket's", "it is suspended"])
async def test_an_unhandled_event_is_dropped_with_its_socket(timed, how):
    handlers = [timed(MAX_BATCH_SECS) for _ in range(4 * CHECK_EVENTS)]
    while not any(handler.events for handler in handlers):
        await trio.lowlevel.checkpoint()
    waiting = next(handler for handler in handlers if not handler.events)
    fd = waiting.near.fileno()
    if how == "it is suspended":
        timed.loop.suspend(fd)
        after = waiting
    else:
        waiting.close()
        timed.loop.flush()
        after = timed(0.0)
        assert after.near.fileno() == fd
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert waiting.events == 0
    assert after.events == (after is not waiting)
    assert sum(handler.events for handler in handlers) == len(handlers) - 1


class Steps(trio.abc.Instrument):
    """Counts the steps of trio's tasks."""

    def __init__(self):
        self.count = 0

    def before_task_step(self, task):
        self.count += 1


async def test_trio_gets_a_turn_after_one_iteration_that_took_long(timed):
    handler, ended, slow_in, next_in = timed(0.0), trio.Event(), [], []
    steps = Steps()

    def handle():
        if slow_in:
            next_in.append(steps.count)
            handler.then = None
            ended.set()
            return
        if not timed.loop._trio.waiting:  # trio had its turns: only the time is a reason to yield
            slow_in.append(steps.count)
            timed.loop.clock.now += MAX_BATCH_SECS * 10
        handler.peer.send(b"x")  # an event for the next iteration

    await trio.testing.wait_all_tasks_blocked(0.01)
    trio.lowlevel.add_instrument(steps)
    handler.then = handle
    handler.peer.send(b"x")
    await ended.wait()
    trio.lowlevel.remove_instrument(steps)
    assert slow_in != next_in


def run_batches(loop, events):
    """Run a batch, and further ones while it has left events or tasks."""
    loop._run_batch(events)
    while loop._unhandled or loop._ready:
        events, loop._unhandled = loop._unhandled, []
        loop._run_batch(events)


@pytest.fixture
def batch():
    """Handlers of a loop that the test runs, more than are handled in one iteration."""
    loop = EventLoop(ManualClock())
    handlers = [Timed(loop, MAX_BATCH_SECS) for _ in range(2 * CHECK_EVENTS)]
    yield loop, handlers, [(handler.near.fileno(), EPOLLOUT) for handler in handlers]
    for handler in handlers:
        handler.close()
    loop.flush()
    loop._epoll.close()


def test_a_socket_that_reuses_a_descriptor_gets_no_event_of_the_closed_one(batch):
    """One handler closes a socket whose event is left for the next iteration, in which another
    handler opens a socket."""
    loop, handlers, events = batch
    closed, opened = handlers[-1], []
    fd = closed.near.fileno()
    handlers[0].then = closed.close
    handlers[-2].then = lambda: opened.append(Timed(loop, 0.0))
    run_batches(loop, events)
    handlers += opened
    assert opened[0].near.fileno() == fd
    assert (closed.events, opened[0].events) == (0, 0)


class Woken:
    """A task that takes `secs`, and calls `then`."""

    waiting_on = None

    def __init__(self, loop, secs, then):
        self.loop, self.secs, self.then = loop, secs, then

    def step(self):
        self.loop.clock.now += self.secs
        self.then(self)


def test_a_woken_task_runs_after_all_events_of_its_iteration(batch):
    loop, handlers, events = batch
    handled = []
    task = Woken(loop, 0.0, lambda _: handled.append(sum(each.events for each in handlers)))
    handlers[0].then = lambda: loop.call_soon(task)
    run_batches(loop, events)
    assert handled == [len(handlers)]


def test_tasks_that_take_long_are_left_to_the_next_iteration_in_their_order(batch):
    loop, _, _ = batch
    stepped, counts = [], []
    tasks = [Woken(loop, MAX_BATCH_SECS / 4, stepped.append) for _ in range(3 * CHECK_EVENTS)]
    for task in tasks:
        loop.call_soon(task)
    while loop._ready:
        loop._run_batch([])
        counts.append(len(stepped))
    assert counts[0] == 5
    assert loop._ended_early
    assert stepped == tasks
