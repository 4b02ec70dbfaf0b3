"""When control takes one of its processes for deaf."""

import pytest

from omni_proxy.multiprocess.messages import DrainCommand
from omni_proxy.multiprocess.process_slot import MAX_STARTUP_TICKS, MAX_UNACKED_TICKS, ProcessHandle


@pytest.fixture
async def handle():
    made = ProcessHandle(1)
    yield made
    made._channel.close()
    made._theirs.close()


async def test_one_that_has_answered_once_is_deaf_soon(handle):
    handle.send(DrainCommand())
    handle.send(DrainCommand())
    handle.acked, handle.silent_ticks = 1, MAX_UNACKED_TICKS
    assert not handle.is_unresponsive
    handle.silent_ticks += 1
    assert handle.is_unresponsive


async def test_one_that_only_begins_has_more_time_but_not_for_ever(handle):
    handle.send(DrainCommand())
    handle.silent_ticks = MAX_STARTUP_TICKS
    assert not handle.is_unresponsive
    handle.silent_ticks += 1
    assert handle.is_unresponsive


async def test_one_that_was_told_nothing_more_is_not_deaf(handle):
    handle.send(DrainCommand())
    handle.acked, handle.silent_ticks = 1, 1000
    assert not handle.is_unresponsive
