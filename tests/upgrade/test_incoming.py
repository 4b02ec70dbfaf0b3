"""The new program in a takeover, if a program ends during it; this process is both programs."""

import os
import socket
from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.fleet.registry import Fleet
from omni_proxy.launch.child_process import ReplicaRecord
from omni_proxy.multiprocess.reuseport_group import GroupSockets
from omni_proxy.upgrade.child_program import ChannelClosed, HandoverChannel
from omni_proxy.upgrade.incoming import Incoming, NoState, NotReady, take_state
from omni_proxy.upgrade.state import (
    CommitMessage,
    HandoverState,
    ReadyMessage,
    StartedMessage,
    StateMessage,
)

STARTUP = Startup(None, {}, (), "")
REPLICA = ReplicaRecord(name="small", index=0, pid=7)


@pytest.fixture
def channels():
    old, new = socket.socketpair()
    with old, new:
        yield HandoverChannel(old), HandoverChannel(new)


@pytest.fixture
def incoming(channels):
    return Incoming(channels[1], os.dup(2), killed_secs=0)


class NewServer:
    """The services of the new program. `adopted`: the replicas that its launcher has adopted."""

    def __init__(self):
        self.adopted = []
        fleet, config = Fleet(), parse("")
        picker = SimpleNamespace(listens=True, restore=lambda reservations, targets: None)
        self.parts = SimpleNamespace(
            fleet=fleet,
            config_store=SimpleNamespace(config=config),
            data_plane=DataPlane(
                fleet, config, admin_socket="/nowhere", sources=Sources(lambda bound: 0)
            ),
            process_manager=SimpleNamespace(
                inherited=GroupSockets(), slots={}, session_tables=(), open=lambda: None
            ),
            launcher=SimpleNamespace(adopt=self._adopt),
            admin_socket="/nowhere",
            picker=lambda: picker,
            unlisted_sources=list,
        )

    def _adopt(self, replicas):
        for replica in replicas:
            self.adopted.append(replica.record)
            replica.close()


@pytest.fixture
def server():
    return NewServer()


@pytest.fixture
def handed_over(channels, incoming):
    """The new program has the state of the old one, which has a replica."""
    running, _ = channels
    with open(os.devnull) as null:
        running.send(StateMessage(HandoverState(replicas=(REPLICA,))), [null.fileno()] * 2)
    incoming.wait_state(STARTUP)
    message, _ = running.receive()
    assert isinstance(message, StartedMessage)


async def receive_ready(channel):
    message, _ = await trio.to_thread.run_sync(channel.receive)
    assert isinstance(message, ReadyMessage)


async def end_while_ready(channels, incoming, server, *messages):
    """The new program ends when it has reported that it is ready, and got these messages."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(incoming.take_over, server.parts, nursery, ())
        await receive_ready(channels[0])
        for message in messages:
            channels[0].send(message)
        nursery.cancel_scope.cancel()


async def test_a_program_that_ends_before_the_commit_owns_nothing(
    channels, incoming, server, handed_over
):
    await end_while_ready(channels, incoming, server)
    assert server.adopted == []
    with pytest.raises(ChannelClosed):
        channels[0].send(CommitMessage())


async def test_a_program_that_ends_with_the_commit_owns_the_replicas(
    channels, incoming, server, handed_over
):
    await end_while_ready(channels, incoming, server, CommitMessage())
    assert server.adopted == [REPLICA]


async def test_a_program_can_decline_until_it_has_offered_to_take_over(
    channels, incoming, server, handed_over
):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(incoming.take_over, server.parts, nursery, ())
        await receive_ready(channels[0])
        assert not incoming.decline()
        channels[0].send(CommitMessage())
    assert server.adopted == [REPLICA]


async def test_a_program_that_has_declined_does_not_take_over(
    channels, incoming, server, handed_over
):
    assert incoming.decline()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(incoming.take_over, server.parts, nursery, ())
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    channels[1].wake_receivers()
    with pytest.raises(ChannelClosed):  # it has sent nothing
        channels[0].receive()
    assert server.adopted == []


async def test_a_running_program_that_ends_the_upgrade_keeps_its_replicas(
    channels, incoming, server, handed_over, nursery
):
    async def give_up():
        await receive_ready(channels[0])
        channels[0].wake_receivers()

    nursery.start_soon(give_up)
    with pytest.raises(NotReady, match="has ended the upgrade, and continues"):
        await incoming.take_over(server.parts, nursery, ())
    assert server.adopted == []


def test_without_a_state_of_the_running_program_the_new_one_does_not_start(channels, incoming):
    channels[0].wake_receivers()
    with pytest.raises(NoState, match="has ended the upgrade"):
        take_state(incoming, STARTUP)
