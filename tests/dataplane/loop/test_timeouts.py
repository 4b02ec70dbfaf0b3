from math import inf

import trio

from omni_proxy.dataplane.loop import event_loop as pumps
from omni_proxy.dataplane.loop import timeouts
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout
from tests.dataplane.pumping import Scripted


def waiting(loop, wires, due, told):
    async def script(task):
        try:
            await task.wait_for(task.end)
        except PhaseTimeout as expired:
            told.append(str(expired))
            task.end.close()

    task = Scripted(loop, script)
    task.end, _ = wires.conn(task)
    task.phase, task.phase_deadline = f"due at {due}", due
    task.start()
    return task


async def test_a_sweep_ends_what_is_past_its_due_and_nothing_else(loop, wires, monkeypatch):
    told = []
    late, later, free = (waiting(loop, wires, due, told) for due in (10.0, 20.0, inf))
    monkeypatch.setattr(timeouts, "monotonic", lambda: 15.0)
    timeouts.expire_tasks(loop)
    assert told == ["due at 10.0"]
    assert loop.tasks == {later, free}
    assert (loop.now, late.end.sock.fileno()) == (15.0, -1)
    timeouts.expire_tasks(loop)
    assert told == ["due at 10.0"]


async def test_a_due_that_is_reached_but_not_passed_may_go_on(loop, wires, monkeypatch):
    told = []
    waiting(loop, wires, 15.0, told)
    monkeypatch.setattr(timeouts, "monotonic", lambda: 15.0)
    timeouts.expire_tasks(loop)
    assert told == []


async def test_a_sweep_may_end_a_task_that_ends_another(loop, wires, monkeypatch):
    told = []
    other = waiting(loop, wires, 10.0, told)

    async def script(task):
        try:
            await task.wait_for(task.end)
        finally:
            other.throw(ClientDisconnected())

    for _ in range(3):
        task = Scripted(loop, script)
        task.end, _ = wires.conn(task)
        task.phase_deadline = 10.0
        task.start()
    monkeypatch.setattr(timeouts, "monotonic", lambda: 15.0)
    timeouts.expire_tasks(loop)
    assert loop.tasks == set()


async def test_chores_run_at_each_sweep(nursery, autojump_clock):
    loop, swept = pumps.EventLoop(), []
    nursery.start_soon(timeouts.run, loop, lambda: swept.append("lanes"), lambda: swept.append("l"))
    await trio.sleep(timeouts.SWEEP_SECS * 2.5)
    assert swept == ["lanes", "l"] * 2
    loop._epoll.close()
