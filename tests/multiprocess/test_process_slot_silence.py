"""When the main process considers a data-plane process unresponsive."""

import pytest

from omni_proxy.multiprocess.ipc.messages import DrainCommand
from omni_proxy.multiprocess.process_slot import MAX_STARTUP_TICKS, MAX_UNACKED_TICKS, ProcessHandle


@pytest.fixture
async def handle():
    process = ProcessHandle(1)
    yield process
    process.close()


async def test_a_process_that_stops_acknowledging_is_unresponsive_soon(handle):
    handle.send(DrainCommand())
    handle.send(DrainCommand())
    handle.acked, handle.silent_ticks = 1, MAX_UNACKED_TICKS
    assert not handle.is_unresponsive
    handle.silent_ticks += 1
    assert handle.is_unresponsive


async def test_a_process_that_starts_has_more_time_but_a_limit(handle):
    handle.send(DrainCommand())
    handle.silent_ticks = MAX_STARTUP_TICKS
    assert not handle.is_unresponsive
    handle.silent_ticks += 1
    assert handle.is_unresponsive


async def test_a_process_with_nothing_to_acknowledge_is_not_unresponsive(handle):
    handle.send(DrainCommand())
    handle.acked, handle.silent_ticks = 1, 1000
    assert not handle.is_unresponsive
