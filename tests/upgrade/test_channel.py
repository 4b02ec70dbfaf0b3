"""Messages and descriptors between two programs."""

import os
import socket

import pytest

from omni_proxy.upgrade.channel import ChannelClosed, HandoverChannel
from omni_proxy.upgrade.state import CommitMessage, ReadyMessage, StartedMessage, UnreadableMessage


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield HandoverChannel(ours), HandoverChannel(theirs)


def test_descriptors_come_with_their_message_and_are_not_inherited(ends):
    ours, theirs = ends
    with open("/dev/null", "rb") as file:
        ours.send(StartedMessage((1,), "x"))
        ours.send(CommitMessage(), [file.fileno()] * 450)
        ours.send(ReadyMessage(7, "path"))
        assert theirs.receive() == (StartedMessage((1,), "x"), [])
        message, numbers = theirs.receive()
        assert (message, len(numbers)) == (CommitMessage(), 450)
        assert not any(os.get_inheritable(number) for number in numbers)
        assert all(os.path.samestat(os.fstat(n), os.fstat(file.fileno())) for n in numbers)
        for number in numbers:
            os.close(number)
        assert theirs.receive() == (ReadyMessage(7, "path"), [])


def test_an_end_is_no_message(ends):
    ours, theirs = ends
    ours.send(CommitMessage())
    ours.shut()
    assert theirs.receive() == (CommitMessage(), [])
    for call in (theirs.receive, lambda: theirs.send(CommitMessage())):
        with pytest.raises(ChannelClosed):
            call()


def test_another_form_is_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((2).to_bytes(4, "big") + bytes(4) + b"{}")
        with pytest.raises(UnreadableMessage):
            HandoverChannel(theirs).receive()
