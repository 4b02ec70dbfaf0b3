"""The new program's last step of a takeover, when it is ended meanwhile."""

import os
import socket
from types import SimpleNamespace

import pytest
import trio

from omni_proxy.upgrade.channel import ChannelClosed, HandoverChannel
from omni_proxy.upgrade.incoming import Incoming
from omni_proxy.upgrade.state import CommitMessage


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield HandoverChannel(ours), HandoverChannel(theirs)


@pytest.fixture
def adopted():
    return []


@pytest.fixture
def incoming(ends):
    return Incoming(ends[1], os.dup(2))


async def cancelled_wait(incoming, adopted) -> None:
    parts = SimpleNamespace(launcher=SimpleNamespace(adopt=adopted.append))
    with trio.CancelScope() as scope:
        scope.cancel()
        await incoming._wait_commit(parts)
    assert scope.cancelled_caught


async def test_a_program_that_ends_before_the_commit_owns_nothing_and_none_can_be_sent(
    ends, incoming, adopted
):
    await cancelled_wait(incoming, adopted)
    assert adopted == []
    with pytest.raises(ChannelClosed):
        ends[0].send(CommitMessage())


async def test_a_program_that_ends_with_the_commit_owns_the_replicas(ends, incoming, adopted):
    ends[0].send(CommitMessage())
    await cancelled_wait(incoming, adopted)
    assert len(adopted) == 1


def test_a_program_declines_only_until_it_has_offered_to_take_over(incoming):
    assert incoming.decline()
    incoming._offered = True
    assert not incoming.decline()
