from itertools import pairwise

import pytest
import trio

from omni_proxy.health.prober import StartThrottle


class LoopIterations(trio.abc.Instrument):
    """Counts the iterations of the event loop."""

    def __init__(self):
        self.count = 0

    def before_io_wait(self, timeout):
        self.count += 1


@pytest.mark.parametrize("iterations", [1, 4])
async def test_one_task_starts_per_number_of_iterations(iterations):
    counter, throttle, started = LoopIterations(), StartThrottle(iterations), []

    async def start():
        await throttle.wait_turn()
        started.append(counter.count)

    trio.lowlevel.add_instrument(counter)
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(start)
    finally:
        trio.lowlevel.remove_instrument(counter)
    gaps = [later - earlier for earlier, later in pairwise(started)]
    assert min(gaps) >= iterations


async def test_a_cancelled_task_lets_the_next_one_start():
    throttle = StartThrottle()
    with trio.CancelScope() as scope:
        scope.cancel()
        await throttle.wait_turn()
    assert scope.cancelled_caught
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(throttle.wait_turn)
            nursery.start_soon(throttle.wait_turn)
