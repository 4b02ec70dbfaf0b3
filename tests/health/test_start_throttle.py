from itertools import pairwise

import pytest
import trio

from omni_proxy.health.start_throttle import StartThrottle


class Turns(trio.abc.Instrument):
    """Counts the turns of the event loop."""

    def __init__(self):
        self.count = 0

    def before_io_wait(self, timeout):
        self.count += 1


@pytest.mark.parametrize("turns", [1, 4])
async def test_of_many_that_come_at_once_one_begins_in_each_so_many_turns(turns):
    seen, pace, began = Turns(), StartThrottle(turns), []

    async def one():
        await pace.wait_turn()
        began.append(seen.count)

    trio.lowlevel.add_instrument(seen)
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one)
    finally:
        trio.lowlevel.remove_instrument(seen)
    gaps = [later - earlier for earlier, later in pairwise(began)]
    assert min(gaps) >= turns


async def test_one_that_is_cancelled_in_the_line_holds_up_nobody():
    pace = StartThrottle()
    with trio.CancelScope() as scope:
        scope.cancel()
        await pace.wait_turn()
    assert scope.cancelled_caught
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pace.wait_turn)
            nursery.start_soon(pace.wait_turn)
