"""Messages and descriptors between the two programs of an upgrade."""

import os
import socket

import pytest

from omni_proxy.upgrade.child_program import ChannelClosed, HandoverChannel
from omni_proxy.upgrade.state import CommitMessage, ReadyMessage, StartedMessage, UnreadableMessage


@pytest.fixture
def channels():
    old, new = socket.socketpair()
    with old, new:
        yield HandoverChannel(old), HandoverChannel(new)


def test_descriptors_arrive_with_their_message_and_are_not_inheritable(channels):
    old, new = channels
    with open("/dev/null", "rb") as file:
        old.send(StartedMessage((1,), "x"))
        old.send(CommitMessage(), [file.fileno()] * 450)
        old.send(ReadyMessage(7, "path"))
        assert new.receive() == (StartedMessage((1,), "x"), [])
        message, numbers = new.receive()
        assert (message, len(numbers)) == (CommitMessage(), 450)
        assert not any(os.get_inheritable(number) for number in numbers)
        assert all(os.path.samestat(os.fstat(n), os.fstat(file.fileno())) for n in numbers)
        for number in numbers:
            os.close(number)
        assert new.receive() == (ReadyMessage(7, "path"), [])


def test_the_end_of_the_channel_is_an_error(channels):
    old, new = channels
    old.send(CommitMessage())
    old.wake_receivers()
    assert new.receive() == (CommitMessage(), [])
    for call in (new.receive, lambda: new.send(CommitMessage())):
        with pytest.raises(ChannelClosed):
            call()


def test_an_invalid_message_is_refused():
    old, new = socket.socketpair()
    with old, new:
        old.sendall((2).to_bytes(4, "big") + bytes(4) + b"{}")
        with pytest.raises(UnreadableMessage):
            HandoverChannel(new).receive()
