import os
import socket
from select import EPOLLHUP, EPOLLOUT, EPOLLRDHUP

import pytest
import trio
import trio.lowlevel
import trio.testing

from omni_proxy.dataplane.loop.event_loop import (
    EventLoop,
    IoHandler,
)
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import (
    ANY_STREAM,
    READS_PER_STEP,
    ClientDisconnected,
    PhaseTimeout,
    await_direct,
    pause,
)
from tests.dataplane.loop_script import Scripted, Wires, until


async def test_a_task_is_stepped_when_its_stream_has_bytes(loop, wires):
    received = []

    async def script(task):
        stream, _ = task.ends
        while (chunk := stream.read(10)) is None:
            await task.wait_for(stream)
        received.append(chunk)
        stream.close()

    task = Scripted(loop, script)
    task.ends = stream, peer = wires.stream(task)
    task.start()
    assert (received, task in loop.tasks) == ([], True)
    peer.send(b"hello")
    await task.ended.wait()
    assert (received, task in loop.tasks, stream.closed) == ([b"hello"], False, True)


async def test_an_event_of_another_stream_is_recorded_and_does_not_step_the_task(loop, wires):
    readable_then = []

    async def script(task):
        await task.wait_for(task.second[0])
        readable_then.append(task.first[0].readable)

    task = Scripted(loop, script)
    task.first, task.second = wires.stream(task), wires.stream(task)
    task.start()
    task.first[1].send(b"x")
    await until(lambda: task.first[0].readable)
    assert readable_then == []
    task.second[1].send(b"x")
    await task.ended.wait()
    assert readable_then == [True]


async def test_a_task_can_wait_for_any_of_its_streams(loop, wires):
    async def script(task):
        await task.wait_for(ANY_STREAM)

    for which in (0, 1):
        task = Scripted(loop, script)
        ends = wires.stream(task), wires.stream(task)
        # A new socket is writable, which is an event too: let it pass before the task waits.
        await trio.testing.wait_all_tasks_blocked(0.01)
        task.start()
        ends[which][1].send(b"x")
        await task.ended.wait()


async def test_read_distinguishes_bytes_nothing_yet_and_the_end(loop, wires):
    stream, peer = wires.stream(None)
    assert stream.read(4) is None
    peer.send(b"abcdef")
    await until(lambda: stream.readable)
    assert (stream.read(4), stream.readable) == (b"abcd", True)  # a full read: there may be more
    assert (stream.read(4), stream.readable) == (b"ef", False)  # a short read: there is no more
    peer.shutdown(socket.SHUT_WR)
    await until(lambda: stream.peer_closed)
    assert (stream.readable, stream.read(4)) == (True, b"")


async def test_a_client_disconnect_is_noticed_whatever_the_task_waits_for(loop, wires):
    ended = []

    async def script(task):
        try:
            await task.wait_for(task.other[0])
        except ClientDisconnected:
            ended.append("disconnected")
            raise

    task = Scripted(loop, script)
    task.client, peer = wires.stream(task)
    task.other = wires.stream(task)
    task.start()
    peer.close()
    await task.ended.wait()
    assert (ended, loop.failures) == (["disconnected"], 0)


async def test_a_task_can_ignore_a_half_close(loop, wires):
    class IgnoresHalfClose(Scripted):
        def is_disconnect(self, mask):
            return bool(mask & EPOLLHUP)

    async def script(task):
        await task.wait_for(task.other[0])

    task = IgnoresHalfClose(loop, script)
    task.client, peer = wires.stream(task)
    task.other = wires.stream(task)
    task.start()
    peer.shutdown(socket.SHUT_WR)
    await until(lambda: task.client.peer_closed)
    assert task in loop.tasks
    peer.close()
    await task.ended.wait()


async def test_a_stream_closed_in_an_iteration_gets_no_more_of_its_events(loop, wires):
    seen = []

    class ClosesTheOther(IoHandler):
        def __init__(self, fd, other):
            self.fd, self.other = fd, other

        def on_event(self, mask):
            seen.append(self.fd)
            self.other.close()

    first, _ = wires.stream(None)
    second, _ = wires.stream(None)
    loop._handlers[first.fd] = ClosesTheOther(first.fd, second)
    loop._handlers[second.fd] = ClosesTheOther(second.fd, first)
    await until(lambda: first.closed or second.closed)
    assert len(seen) == 1


async def test_a_descriptor_is_closed_only_after_the_iteration(loop, wires):
    stream, _ = wires.stream(None)
    stream.close()
    stream.close()
    assert stream.sock.fileno() == stream.fd
    assert loop._handlers[stream.fd] is None
    loop.flush()
    assert stream.sock.fileno() == -1


async def test_a_reset_is_seen_as_a_reset(loop):
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    near.setblocking(False)
    Stream(loop, near, None).close(reset=True)
    loop.flush()
    with pytest.raises(ConnectionResetError):
        peer.recv(1)
    peer.close()
    listener.close()


async def test_awaiting_trio_in_a_connection_task_is_an_error(loop, caplog):
    cleaned = []

    async def script(task):
        try:
            await trio.lowlevel.checkpoint()
        finally:
            cleaned.append(True)

    task = Scripted(loop, script)
    task.start()
    assert (cleaned, loop.failures, loop.tasks) == ([True], 1, set())
    assert "must not await trio" in caplog.text


async def test_a_task_that_fails_leaves_the_others_alone(loop, wires, caplog):
    async def broken(task):
        raise ZeroDivisionError("oops")

    async def sound(task):
        await task.wait_for(task.ends[0])

    task = Scripted(loop, sound)
    task.ends = wires.stream(task)
    task.start()
    Scripted(loop, broken).start()
    assert (loop.failures, loop.tasks) == (1, {task})
    assert "oops" in caplog.text
    task.ends[1].send(b"x")
    await task.ended.wait()


async def test_await_direct_returns_and_raises_to_its_caller(loop, wires):
    seen = []

    async def inner(task, fails):
        await task.wait_for(task.ends[0])
        if fails:
            raise LookupError("inner")
        return "value"

    async def script(task):
        seen.append(await await_direct(inner(task, False)))
        try:
            await await_direct(inner(task, True))
        except LookupError as error:
            seen.append(str(error))

    task = Scripted(loop, script)
    task.ends = wires.stream(task)
    task.start()
    for _ in range(2):
        before = len(seen)
        task.ends[1].send(b"x")
        await until(lambda: len(seen) > before)  # noqa: B023
    assert seen == ["value", "inner"]


async def test_a_phase_timeout_names_the_phase_and_ends_the_task_quietly(loop, wires):
    seen = []

    async def script(task):
        try:
            await task.wait_for(task.ends[0])
        except PhaseTimeout as expired:
            seen.append((str(expired), task.phase_deadline))
            raise

    task = Scripted(loop, script)
    task.ends = wires.stream(task)
    task.phase, task.phase_deadline = "head", 1.0
    task.start()
    task.on_phase_timeout()
    assert seen == [("head", float("inf"))]
    assert (loop.tasks, loop.failures) == (set(), 0)


async def test_cancelling_the_loop_runs_every_finally_and_closes_every_socket():
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
            task.ends = wires.stream(task)
            task.start()
        nursery.cancel_scope.cancel()
    assert order == ["inner", "outer"] * 2
    assert loop.tasks == set()
    for task in tasks:
        assert task.ends[0].sock.fileno() == -1
        assert task.ends[1].recv(1) == b""
        task.ends[1].close()


def test_a_loop_that_never_ran_leaves_no_descriptor_open():
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        EventLoop()
    assert os.listdir("/proc/self/fd") == before


async def test_tasks_ended_is_set_when_the_last_task_has_ended(loop, wires):
    async def script(task):
        await task.wait_for(task.ends[0])

    tasks = [Scripted(loop, script) for _ in range(2)]
    tasks_ended = loop.tasks_ended
    for task in tasks:
        task.ends = wires.stream(task)
        task.start()
    tasks[0].throw(ClientDisconnected())
    assert not tasks_ended.is_set()
    tasks[1].throw(ClientDisconnected())
    assert tasks_ended.is_set()
    assert not loop.tasks_ended.is_set()


async def test_a_busy_loop_gives_trio_its_turns(busy):
    with trio.fail_after(30):
        for _ in range(20):
            await trio.lowlevel.checkpoint()
    assert busy.batches


async def test_a_writable_event_is_no_idle_event(loop, wires):
    stream, _ = wires.stream(None)
    stepped = []
    stream.on_idle_event = stepped.append
    stream.on_event(EPOLLOUT)
    assert (stepped, stream.readable) == ([], False)
    stream.on_event(EPOLLRDHUP)
    assert (stepped, stream.readable, stream.peer_closed) == ([stream], True, True)


async def test_a_peer_that_always_has_more_does_not_starve_other_tasks(loop, wires):
    reads = []

    async def script(task):
        stream, _ = task.ends
        stream.readable = True
        for _ in range(5 * READS_PER_STEP):
            if task.must_wait_for(stream):
                await pause
            reads.append(task)

    tasks = [Scripted(loop, script) for _ in range(2)]
    for task in tasks:
        task.ends = wires.stream(task)
        task.start()
    with trio.fail_after(30):
        for task in tasks:
            await task.ended.wait()
    assert reads.index(tasks[1]) < len(reads) - 1 - reads[::-1].index(tasks[0])
    assert [reads.count(task) for task in tasks] == [5 * READS_PER_STEP] * 2


async def test_wake_ends_the_wait_of_an_idle_loop(loop):
    parked_then = []

    async def script(task):
        for _ in range(3):
            task.waiting_on = parked_then
            await pause
            parked_then.append(loop._parked)

    task = Scripted(loop, script)
    task.start()
    for count in range(1, 4):
        await until(lambda: loop._parked)
        loop.wake(task)
        await until(lambda count=count: len(parked_then) == count)
    assert parked_then == [False] * 3


async def test_a_task_stepped_outside_an_iteration_resumes_after_its_read_budget(loop, wires):
    """The end of a sleep or of a phase does not wake an idle loop by itself."""

    async def script(task):
        stream, _ = task.ends
        await task.wait_for(task)
        stream.readable = True
        for _ in range(READS_PER_STEP):
            if task.must_wait_for(stream):
                await pause

    task = Scripted(loop, script)
    task.ends = wires.stream(task)
    task.start()
    await trio.testing.wait_all_tasks_blocked(0.01)
    task.step()
    with trio.fail_after(30):
        await task.ended.wait()
