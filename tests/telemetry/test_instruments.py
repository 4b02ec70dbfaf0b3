import time

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.telemetry.instruments import STEP_SECS, STEPS, HoldTimes, Ticker
from tests.fleet.entries import entry, fleet_of


async def test_the_ticker_ticks_once_a_second(autojump_clock, nursery):
    ticks = []
    ticker = Ticker(lambda at: ticks.append((trio.current_time(), at)), lambda _: None)
    await nursery.start(ticker.run)
    began = trio.current_time()
    await trio.sleep(10.1)
    assert len(ticks) == 10
    assert [round(at - began) for at, _ in ticks] == list(range(1, 11))
    assert abs(ticks[-1][1] - time.time()) < 60
    assert sum(ticker.lag.counts) >= 10 * STEPS


async def test_the_ticker_measures_a_blocked_loop(mock_clock, nursery):
    ticks = []
    ticker = Ticker(ticks.append, lambda _: None)
    await nursery.start(ticker.run)
    await wait_all_tasks_blocked()
    mock_clock.jump(1.0)  # as if a task had run for a second
    await wait_all_tasks_blocked()
    for _ in range(STEPS - 1):
        mock_clock.jump(STEP_SECS)
        await wait_all_tasks_blocked()
    assert ticker.lag.sum == pytest.approx(1.0 - STEP_SECS)
    assert ticker.worst_secs == pytest.approx(1.0 - STEP_SECS)
    assert len(ticks) == 1


def test_a_hold_has_the_time_of_its_first_tick_until_it_ends():
    fleet = fleet_of(entry("a"), entry("b"))
    holds, worker = HoldTimes(fleet), fleet.workers[0]
    fleet.cordon(worker, "updating")
    holds.tick(10)
    fleet.cordon(worker, "uncertain")
    assert holds.of(worker) == {"updating": 10}
    holds.tick(11)
    assert holds.of(worker) == {"uncertain": 11, "updating": 10}
    fleet.uncordon(worker, "updating")
    assert holds.of(worker) == {"uncertain": 11}
    fleet.uncordon(worker, "uncertain")
    holds.tick(12)
    fleet.cordon(worker, "uncertain")
    holds.tick(13)
    assert (holds.of(worker), holds.of(fleet.workers[1])) == ({"uncertain": 13}, {})
