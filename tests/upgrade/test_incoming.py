"""The last step of a takeover in the new program, if a program ends during it."""

import os
import socket
from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.config.flags import Startup
from omni_proxy.upgrade.channel import ChannelClosed, HandoverChannel
from omni_proxy.upgrade.incoming import Incoming, NoState, NotReady, take_state
from omni_proxy.upgrade.outgoing import Outgoing
from omni_proxy.upgrade.state import CommitMessage


@pytest.fixture
def channels():
    old, new = socket.socketpair()
    with old, new:
        yield HandoverChannel(old), HandoverChannel(new)


@pytest.fixture
def adopted():
    return []


@pytest.fixture
def incoming(channels):
    return Incoming(channels[1], os.dup(2))


async def cancelled_wait(incoming, adopted) -> None:
    parts = SimpleNamespace(launcher=SimpleNamespace(adopt=adopted.append))
    with trio.CancelScope() as scope:
        scope.cancel()
        await incoming._wait_commit(parts)
    assert scope.cancelled_caught


async def test_a_program_that_ends_before_the_commit_owns_nothing(channels, incoming, adopted):
    await cancelled_wait(incoming, adopted)
    assert adopted == []
    with pytest.raises(ChannelClosed):
        channels[0].send(CommitMessage())


async def test_a_program_that_ends_with_the_commit_owns_the_replicas(channels, incoming, adopted):
    incoming._replicas = ["a replica"]
    channels[0].send(CommitMessage())
    await cancelled_wait(incoming, adopted)
    assert adopted == [["a replica"]]


def test_a_program_can_decline_until_it_has_offered_to_take_over(incoming):
    assert incoming.decline()
    incoming._offered = True
    assert not incoming.decline()


async def test_a_running_program_that_ends_the_upgrade_keeps_its_replicas(
    channels, incoming, adopted, monkeypatch
):
    monkeypatch.setattr("omni_proxy.upgrade.incoming.KILLED_SECS", 0)
    parts = SimpleNamespace(launcher=SimpleNamespace(adopt=adopted.append))
    channels[0].shut()
    with pytest.raises(NotReady):
        await incoming._wait_commit(parts)
    assert adopted == []


def test_without_a_state_of_the_running_program_the_new_one_does_not_start(
    channels, incoming, monkeypatch
):
    monkeypatch.setattr("omni_proxy.upgrade.incoming.KILLED_SECS", 0)
    channels[0].shut()
    with pytest.raises(NoState, match="has ended the upgrade"):
        take_state(incoming, Startup(None, {}, (), ""))


async def test_time_in_which_the_process_was_stopped_does_not_count(mock_clock):
    outgoing = Outgoing(None, None)
    outgoing.running = True
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as outgoing._scope:
            nursery.start_soon(outgoing._end_late, outgoing._scope, 60)
            await wait_all_tasks_blocked()
            mock_clock.jump(1000)
            await wait_all_tasks_blocked()
            assert not outgoing._scope.cancel_called
            for _ in range(120):
                mock_clock.jump(0.5)
                await wait_all_tasks_blocked()
        assert outgoing._scope.cancel_called
