"""What a door does with control's messages, in this process."""

import os
import socket

import msgspec
import pytest

from omni_proxy.config.parse import parse
from omni_proxy.doors import sessions
from omni_proxy.doors.board import Board
from omni_proxy.doors.channel import Channel
from omni_proxy.doors.messages import Begin, Forget, News, ToControl, ToDoor, VoiceList
from omni_proxy.doors.process import DoorHouse
from omni_proxy.fleet.snapshot import row_of
from tests.fleet.entries import entry, fleet_of


@pytest.fixture
async def house(logging_as_it_was, nursery):
    """A door that has been told of two workers, with the serials 1 and 2."""
    one, other = socket.socketpair()
    control = Channel(one, msgspec.msgpack.Decoder(ToControl))
    door = Channel(other, msgspec.msgpack.Decoder(ToDoor))
    kept = sessions.made()
    begin = Begin(1, "/nowhere", 5.0)
    control.tell(begin, [Board.made().descriptor, kept])
    os.close(kept)
    nursery.start_soon(control.pass_on)
    assert await door.hear() == [begin]
    fleet = fleet_of(entry("a"), entry("b"))
    rows = tuple(
        row_of(worker, serial, serial) for serial, worker in enumerate(fleet.workers, start=1)
    )
    yield DoorHouse(begin, News(1, rows, parse(""), VoiceList("", None), 0, 1), door)
    control.close()
    door.close()


async def test_what_control_calls_forgotten_is_forgotten_and_a_worker_that_left_is_no_fault(house):
    forgotten = []
    house.fleet.watch_forgotten(forgotten.append)
    house.take(Forget(2))
    house.take(Forget(3))
    assert [worker.url for worker in forgotten] == ["http://b:1"]
