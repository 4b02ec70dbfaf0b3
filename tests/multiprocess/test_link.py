"""When control takes one of its processes for deaf."""

import pytest

from omni_proxy.multiprocess.messages import DrainCommand
from omni_proxy.multiprocess.process_slot import BEGINNING_TICKS, DEAF_TICKS, ProcessHandle


@pytest.fixture
async def link():
    made = ProcessHandle(1)
    yield made
    made._channel.close()
    made._theirs.close()


async def test_one_that_has_answered_once_is_deaf_soon(link):
    link.tell(DrainCommand())
    link.tell(DrainCommand())
    link.acked, link.silent_ticks = 1, DEAF_TICKS
    assert not link.deaf
    link.silent_ticks += 1
    assert link.deaf


async def test_one_that_only_begins_has_more_time_but_not_for_ever(link):
    link.tell(DrainCommand())
    link.silent_ticks = BEGINNING_TICKS
    assert not link.deaf
    link.silent_ticks += 1
    assert link.deaf


async def test_one_that_was_told_nothing_more_is_not_deaf(link):
    link.tell(DrainCommand())
    link.acked, link.silent_ticks = 1, 1000
    assert not link.deaf
