import pytest
import trio

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.task import ClientDisconnected, PhaseTimeout
from omni_proxy.dataplane.loop.timeouts import Timers
from tests.dataplane.pumping import Scripted


@pytest.fixture
async def timers(nursery):
    """Over a pump that nobody runs: what pauses here is resumed by the timers alone."""
    made = Timers(EventLoop())
    nursery.start_soon(made.run)
    yield made
    made._loop._epoll.close()


def sleeping(timers, secs, woken):
    async def script(task):
        begun = trio.current_time()
        try:
            await timers.sleep(task, secs)
        except (ClientDisconnected, PhaseTimeout) as thrown:
            woken.append(type(thrown))
        else:
            woken.append(round(trio.current_time() - begun, 6))

    task = Scripted(timers._loop, script)
    task.start()
    return task


async def test_each_wakes_at_its_own_time_the_earliest_first(autojump_clock, timers):
    woken = []
    for secs in (3.0, 0.05, 1.0, 0.05, 0.0):
        sleeping(timers, secs, woken)
    await trio.sleep(10)
    assert woken == [0.0, 0.05, 0.05, 1.0, 3.0]


async def test_one_that_comes_later_may_wake_earlier(autojump_clock, timers):
    woken = []
    sleeping(timers, 5.0, woken)
    await trio.sleep(1)
    sleeping(timers, 0.5, woken)
    await trio.sleep(0.6)
    assert woken == [0.5]
    await trio.sleep(10)
    assert woken == [0.5, 5.0]


@pytest.mark.parametrize("thrown", [ClientDisconnected, PhaseTimeout])
async def test_one_that_is_thrown_out_is_not_resumed_by_its_timer(autojump_clock, timers, thrown):
    woken, steps = [], []

    async def script(task):
        try:
            await timers.sleep(task, 1.0)
        except thrown:
            await timers.sleep(task, 5.0)
            woken.append(round(trio.current_time() - begun, 6))

    begun = trio.current_time()
    task = Scripted(timers._loop, script)
    task.start()
    await trio.sleep(0.5)
    task.throw(thrown())
    await trio.sleep(4.9)
    assert (woken, steps) == ([], [])
    await trio.sleep(1)
    assert woken == [5.5]


async def test_an_end_of_its_own_leaves_nothing_behind(autojump_clock, timers):
    woken = []
    task = sleeping(timers, 1.0, woken)
    task.throw(ClientDisconnected())
    await trio.sleep(2)
    assert (woken, timers._heap, timers._loop.tasks) == ([ClientDisconnected], [], set())


async def test_a_step_that_nobody_asked_for_does_not_end_a_pause(autojump_clock, timers):
    woken = []
    task = sleeping(timers, 1.0, woken)
    task.step()
    assert woken == []
    await trio.sleep(2)
    assert woken == [1.0]


async def test_whoever_fails_on_waking_harms_no_other(autojump_clock, timers, caplog):
    async def script(task):
        await timers.sleep(task, 1.0)
        raise ValueError("mine")

    woken = []
    Scripted(timers._loop, script).start()
    sleeping(timers, 1.0, woken)
    await trio.sleep(2)
    assert (woken, timers._loop.failures) == ([1.0], 1)
    assert "mine" in caplog.text
