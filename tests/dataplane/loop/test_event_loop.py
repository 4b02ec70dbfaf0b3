import socket
from select import EPOLLHUP, EPOLLOUT, EPOLLRDHUP

import pytest
import trio
import trio.lowlevel
import trio.testing

from omni_proxy.dataplane.loop.event_loop import MAX_EVENTS, EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import (
    ANY_STREAM,
    READS_PER_STEP,
    ClientDisconnected,
    PhaseTimeout,
    await_direct,
    pause,
)
from tests.dataplane.pumping import Scripted, Wires, until


async def test_a_task_is_resumed_when_its_socket_has_bytes(loop, wires):
    got = []

    async def script(task):
        conn, _ = task.ends
        while (piece := conn.read(10)) is None:
            await task.wait_for(conn)
        got.append(piece)
        conn.close()

    task = Scripted(loop, script)
    task.ends = conn, far = wires.conn(task)
    task.start()
    assert (got, task in loop.tasks) == ([], True)
    far.send(b"hello")
    await task.ended.wait()
    assert (got, task in loop.tasks, conn.closed) == ([b"hello"], False, True)


async def test_trio_has_a_turn_while_more_sockets_have_news_than_a_batch_takes(loop, wires):
    heard, begun = [], trio.Event()

    async def script(task):
        await task.wait_for(task.ends[0])
        heard.append(task)
        begun.set()

    tasks = [Scripted(loop, script) for _ in range(4 * MAX_EVENTS)]
    for task in tasks:
        task.ends = wires.conn(task)
        task.start()
    await trio.testing.wait_all_tasks_blocked(0.01)
    for task in tasks:
        task.ends[1].send(b"x")
    await begun.wait()
    assert len(heard) <= 2 * MAX_EVENTS
    for task in tasks:
        await task.ended.wait()


async def test_an_event_of_another_socket_is_remembered_and_does_not_resume(loop, wires):
    woken = []

    async def script(task):
        await task.wait_for(task.second[0])
        woken.append(task.first[0].readable)

    task = Scripted(loop, script)
    task.first, task.second = wires.conn(task), wires.conn(task)
    task.start()
    task.first[1].send(b"x")
    await until(lambda: task.first[0].readable)
    assert woken == []
    task.second[1].send(b"x")
    await task.ended.wait()
    assert woken == [True]


async def test_either_is_an_event_of_any_socket(loop, wires):
    async def script(task):
        await task.wait_for(ANY_STREAM)

    for which in (0, 1):
        task = Scripted(loop, script)
        ends = wires.conn(task), wires.conn(task)
        # A new socket is writable, which is an event too: let it pass before the task waits.
        await trio.testing.wait_all_tasks_blocked(0.01)
        task.start()
        ends[which][1].send(b"x")
        await task.ended.wait()


async def test_read_tells_bytes_nothing_yet_and_the_end_apart(loop, wires):
    conn, far = wires.conn(None)
    assert conn.read(4) is None
    far.send(b"abcdef")
    await until(lambda: conn.readable)
    assert (conn.read(4), conn.readable) == (b"abcd", True)  # filled: there may be more
    assert (conn.read(4), conn.readable) == (b"ef", False)  # short: that was all
    far.shutdown(socket.SHUT_WR)
    await until(lambda: conn.peer_closed)
    assert (conn.readable, conn.read(4)) == (True, b"")


async def test_a_client_that_leaves_is_noticed_whatever_its_task_awaits(loop, wires):
    ended = []

    async def script(task):
        try:
            await task.wait_for(task.other[0])
        except ClientDisconnected:
            ended.append("gone")
            raise

    task = Scripted(loop, script)
    task.client, far = wires.conn(task)
    task.other = wires.conn(task)
    task.start()
    far.close()
    await task.ended.wait()
    assert (ended, loop.failures) == (["gone"], 0)


async def test_a_task_may_say_that_half_a_close_is_no_departure(loop, wires):
    class Patient(Scripted):
        def is_disconnect(self, mask):
            return bool(mask & EPOLLHUP)

    async def script(task):
        await task.wait_for(task.other[0])

    task = Patient(loop, script)
    task.client, far = wires.conn(task)
    task.other = wires.conn(task)
    task.start()
    far.shutdown(socket.SHUT_WR)
    await until(lambda: task.client.peer_closed)
    assert task in loop.tasks
    far.close()
    await task.ended.wait()


async def test_a_socket_closed_in_a_batch_gets_none_of_its_events(loop, wires):
    seen = []

    class Slot:
        def __init__(self, fd, other):
            self.fd, self.other = fd, other

        def on_event(self, mask):
            seen.append(self.fd)
            self.other.close()

    first, _ = wires.conn(None)
    second, _ = wires.conn(None)
    loop._handlers[first.fd] = Slot(first.fd, second)
    loop._handlers[second.fd] = Slot(second.fd, first)
    await until(lambda: first.closed or second.closed)
    assert len(seen) == 1


async def test_a_closed_socket_is_given_back_only_after_the_batch(loop, wires):
    conn, _ = wires.conn(None)
    conn.close()
    conn.close()
    assert conn.sock.fileno() == conn.fd
    assert loop._handlers[conn.fd] is None
    loop.flush()
    assert conn.sock.fileno() == -1


async def test_a_reset_is_seen_as_a_reset(loop):
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    near.setblocking(False)
    Stream(loop, near, None).close(reset=True)
    loop.flush()
    with pytest.raises(ConnectionResetError):
        far.recv(1)
    far.close()
    listener.close()


async def test_awaiting_trio_inside_a_connection_is_refused(loop, caplog):
    cleaned = []

    async def script(task):
        try:
            await trio.lowlevel.checkpoint()
        finally:
            cleaned.append(True)

    task = Scripted(loop, script)
    task.start()
    assert (cleaned, loop.failures, loop.tasks) == ([True], 1, set())
    assert "may not await trio" in caplog.text


async def test_one_connection_that_fails_leaves_the_others_alone(loop, wires, caplog):
    async def broken(task):
        raise ZeroDivisionError("oops")

    async def sound(task):
        await task.wait_for(task.ends[0])

    task = Scripted(loop, sound)
    task.ends = wires.conn(task)
    task.start()
    Scripted(loop, broken).start()
    assert (loop.failures, loop.tasks) == (1, {task})
    assert "oops" in caplog.text
    task.ends[1].send(b"x")
    await task.ended.wait()


async def test_a_nested_coroutine_returns_and_raises_to_the_one_that_waits_for_it(loop, wires):
    told = []

    async def inner(task, fails):
        await task.wait_for(task.ends[0])
        if fails:
            raise LookupError("inner")
        return "value"

    async def script(task):
        told.append(await await_direct(inner(task, False)))
        try:
            await await_direct(inner(task, True))
        except LookupError as error:
            told.append(str(error))

    task = Scripted(loop, script)
    task.ends = wires.conn(task)
    task.start()
    for _ in range(2):
        before = len(told)
        task.ends[1].send(b"x")
        await until(lambda: len(told) > before)  # noqa: B023
    assert told == ["value", "inner"]


async def test_expired_tells_the_phase_and_ends_quietly_when_nobody_takes_it(loop, wires):
    told = []

    async def script(task):
        try:
            await task.wait_for(task.ends[0])
        except PhaseTimeout as expired:
            told.append((str(expired), task.phase_deadline))
            raise

    task = Scripted(loop, script)
    task.ends = wires.conn(task)
    task.phase, task.phase_deadline = "head", 1.0
    task.start()
    task.on_phase_timeout()
    assert told == [("head", float("inf"))]
    assert (loop.tasks, loop.failures) == (set(), 0)


async def test_cancelling_the_pump_runs_every_finally_and_closes_every_socket():
    order = []
    loop = EventLoop()
    wires = Wires(loop)

    async def inner(task):
        try:
            await task.wait_for(task.ends[0])
        finally:
            order.append("inner")

    async def script(task):
        try:
            await await_direct(inner(task))
        finally:
            order.append("outer")
            task.ends[0].close()

    tasks = [Scripted(loop, script) for _ in range(2)]
    async with trio.open_nursery() as nursery:
        await nursery.start(loop.run)
        for task in tasks:
            task.ends = wires.conn(task)
            task.start()
        nursery.cancel_scope.cancel()
    assert order == ["inner", "outer"] * 2
    assert loop.tasks == set()
    for task in tasks:
        assert task.ends[0].sock.fileno() == -1
        assert task.ends[1].recv(1) == b""
        task.ends[1].close()


async def test_emptied_is_set_when_the_last_connection_has_ended(loop, wires):
    async def script(task):
        await task.wait_for(task.ends[0])

    tasks = [Scripted(loop, script) for _ in range(2)]
    tasks_ended = loop.tasks_ended
    for task in tasks:
        task.ends = wires.conn(task)
        task.start()
    tasks[0].throw(ClientDisconnected())
    assert not tasks_ended.is_set()
    tasks[1].throw(ClientDisconnected())
    assert tasks_ended.is_set()
    assert not loop.tasks_ended.is_set()


async def test_a_busy_pump_gives_the_others_their_turn(busy):
    with trio.fail_after(30):
        for _ in range(20):
            await trio.lowlevel.checkpoint()
    assert busy.batches


async def test_events_without_news_resume_nobody_who_is_idle(loop, wires):
    conn, _ = wires.conn(None)
    heard = []
    conn.on_idle_event = heard.append
    conn.on_event(EPOLLOUT)
    assert (heard, conn.readable) == ([], False)
    conn.on_event(EPOLLRDHUP)
    assert (heard, conn.readable, conn.peer_closed) == ([conn], True, True)


async def test_a_peer_that_always_has_more_does_not_keep_the_others_waiting(loop, wires):
    reads = []

    async def script(task):
        conn, _ = task.ends
        conn.readable = True
        for _ in range(5 * READS_PER_STEP):
            if task.must_wait_for(conn):
                await pause
            reads.append(task)

    tasks = [Scripted(loop, script) for _ in range(2)]
    for task in tasks:
        task.ends = wires.conn(task)
        task.start()
    with trio.fail_after(30):
        for task in tasks:
            await task.ended.wait()
    assert reads.index(tasks[1]) < len(reads) - 1 - reads[::-1].index(tasks[0])
    assert [reads.count(task) for task in tasks] == [5 * READS_PER_STEP] * 2


async def test_a_pump_that_sleeps_is_woken_from_outside(loop):
    resumed = []

    async def script(task):
        for _ in range(3):
            task.waiting_on = resumed
            await pause
            resumed.append(loop._parked)

    task = Scripted(loop, script)
    task.start()
    for count in range(1, 4):
        await until(lambda: loop._parked)
        loop.wake(task)
        await until(lambda count=count: len(resumed) == count)
    assert resumed == [False] * 3


async def test_who_is_stepped_from_outside_and_gives_up_its_turn_is_resumed(loop, wires):
    """A pause that ends, a clock that runs out: nothing of that wakes a pump that sleeps."""

    async def script(task):
        conn, _ = task.ends
        await task.wait_for(task)
        conn.readable = True
        for _ in range(READS_PER_STEP):
            if task.must_wait_for(conn):
                await pause

    task = Scripted(loop, script)
    task.ends = wires.conn(task)
    task.start()
    await trio.testing.wait_all_tasks_blocked(0.01)
    task.step()
    with trio.fail_after(30):
        await task.ended.wait()
