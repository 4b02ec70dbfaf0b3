import time

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.telemetry.instruments import STEP_SECS, STEPS, Ticker


async def test_it_beats_once_a_second(autojump_clock, nursery):
    beats = []
    pulse = Ticker(lambda at: beats.append((trio.current_time(), at)))
    await nursery.start(pulse.run)
    began = trio.current_time()
    await trio.sleep(10.1)
    assert len(beats) == 10
    assert [round(at - began) for at, _ in beats] == list(range(1, 11))
    assert abs(beats[-1][1] - time.time()) < 60
    assert sum(pulse.lag.counts) >= 10 * STEPS


async def test_it_feels_who_keeps_the_loop(mock_clock, nursery):
    beats = []
    pulse = Ticker(beats.append)
    await nursery.start(pulse.run)
    await wait_all_tasks_blocked()
    mock_clock.jump(1.0)  # as if a task had run for so long
    await wait_all_tasks_blocked()
    for _ in range(STEPS - 1):
        mock_clock.jump(STEP_SECS)
        await wait_all_tasks_blocked()
    assert pulse.lag.sum == pytest.approx(1.0 - STEP_SECS)
    assert pulse.worst_secs == pytest.approx(1.0 - STEP_SECS)
    assert len(beats) == 1
