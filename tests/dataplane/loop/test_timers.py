from math import inf

import pytest
import trio

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout
from omni_proxy.dataplane.loop.timers import SWEEP_SECS, Timers, expire_tasks, run_sweeps
from tests.dataplane.loop_script import Scripted
from tests.dataplane.manual_clock import ManualClock


def start_waiting(loop, wires, deadline, expired_phases):
    async def script(task):
        try:
            await task.wait_for(task.end)
        except PhaseTimeout as timeout:
            expired_phases.append(str(timeout))
            task.end.close()

    task = Scripted(loop, script)
    task.end, _ = wires.stream(task)
    task.phase, task.phase_deadline = f"until {deadline}", deadline
    task.start()
    return task


async def test_a_sweep_ends_tasks_past_their_deadline_and_no_others(loop, wires):
    expired_phases = []
    late, later, free = (
        start_waiting(loop, wires, deadline, expired_phases) for deadline in (10.0, 20.0, inf)
    )
    loop.clock = ManualClock(15.0)
    expire_tasks(loop)
    assert expired_phases == ["until 10.0"]
    assert loop.tasks == {later, free}
    assert (loop.now, late.end.sock.fileno()) == (15.0, -1)
    expire_tasks(loop)
    assert expired_phases == ["until 10.0"]


async def test_a_deadline_that_is_just_reached_has_not_expired(loop, wires):
    expired_phases = []
    start_waiting(loop, wires, 15.0, expired_phases)
    loop.clock = ManualClock(15.0)
    expire_tasks(loop)
    assert expired_phases == []


async def test_a_task_that_a_sweep_ends_may_end_another_one(loop, wires):
    expired_phases = []
    other = start_waiting(loop, wires, 10.0, expired_phases)

    async def script(task):
        try:
            await task.wait_for(task.end)
        finally:
            other.throw(ClientDisconnected())

    for _ in range(3):
        task = Scripted(loop, script)
        task.end, _ = wires.stream(task)
        task.phase_deadline = 10.0
        task.start()
    loop.clock = ManualClock(15.0)
    expire_tasks(loop)
    assert loop.tasks == set()


async def test_chores_run_with_each_sweep(nursery, autojump_clock):
    loop, swept = EventLoop(), []
    nursery.start_soon(
        run_sweeps, loop, lambda: swept.append("first"), lambda: swept.append("second")
    )
    await trio.sleep(SWEEP_SECS * 2.5)
    assert swept == ["first", "second"] * 2
    loop._epoll.close()


@pytest.fixture
async def timers(nursery):
    """Timers of an event loop that does not run: only the timers step a task."""
    started = Timers(EventLoop())
    nursery.start_soon(started.run)
    yield started
    started._loop._epoll.close()


def start_sleeping(timers, secs, woken):
    async def script(task):
        began = trio.current_time()
        try:
            await timers.sleep(task, secs)
        except (ClientDisconnected, PhaseTimeout) as thrown:
            woken.append(type(thrown))
        else:
            woken.append(round(trio.current_time() - began, 6))

    task = Scripted(timers._loop, script)
    task.start()
    return task


async def test_sleeps_end_in_the_order_of_their_times(autojump_clock, timers):
    woken = []
    for secs in (3.0, 0.05, 1.0, 0.05, 0.0):
        start_sleeping(timers, secs, woken)
    await trio.sleep(10)
    assert woken == [0.0, 0.05, 0.05, 1.0, 3.0]


async def test_a_sleep_that_starts_later_may_end_earlier(autojump_clock, timers):
    woken = []
    start_sleeping(timers, 5.0, woken)
    await trio.sleep(1)
    start_sleeping(timers, 0.5, woken)
    await trio.sleep(0.6)
    assert woken == [0.5]
    await trio.sleep(10)
    assert woken == [0.5, 5.0]


@pytest.mark.parametrize("thrown", [ClientDisconnected, PhaseTimeout])
async def test_a_sleep_that_was_interrupted_does_not_end_the_next_one(
    autojump_clock, timers, thrown
):
    woken = []

    async def script(task):
        try:
            await timers.sleep(task, 1.0)
        except thrown:
            await timers.sleep(task, 5.0)
            woken.append(round(trio.current_time() - began, 6))

    began = trio.current_time()
    task = Scripted(timers._loop, script)
    task.start()
    await trio.sleep(0.5)
    task.throw(thrown())
    await trio.sleep(4.9)
    assert woken == []
    await trio.sleep(1)
    assert woken == [5.5]


async def test_an_interrupted_sleep_leaves_nothing_in_the_heap(autojump_clock, timers):
    woken = []
    task = start_sleeping(timers, 1.0, woken)
    task.throw(ClientDisconnected())
    await trio.sleep(2)
    assert (woken, timers._heap, timers._loop.tasks) == ([ClientDisconnected], [], set())


async def test_a_stray_step_does_not_end_a_sleep(autojump_clock, timers):
    woken = []
    task = start_sleeping(timers, 1.0, woken)
    task.step()
    assert woken == []
    await trio.sleep(2)
    assert woken == [1.0]


async def test_a_task_that_fails_after_its_sleep_leaves_the_others_alone(
    autojump_clock, timers, caplog
):
    async def script(task):
        await timers.sleep(task, 1.0)
        raise ValueError("broken")

    woken = []
    Scripted(timers._loop, script).start()
    start_sleeping(timers, 1.0, woken)
    await trio.sleep(2)
    assert (woken, timers._loop.failures) == ([1.0], 1)
    assert "broken" in caplog.text
