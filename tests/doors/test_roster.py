import os
import resource

import pytest

from omni_proxy.config.parse import parse
from omni_proxy.door.core import Door
from omni_proxy.doors.roster import Roster
from tests.fleet.entries import entry, fleet_of


@pytest.fixture
def roster():
    fleet = fleet_of(entry("any"))
    door = Door(fleet, parse(""), front_socket="/nowhere", below=lambda bound: 0)
    yield Roster(fleet, door)
    door.pump._set.close()
    os.close(door.pump._bell)


@pytest.fixture
def no_room():
    """Nothing more can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_door_that_could_never_begin_for_want_of_descriptors_can_be_buried(roster, no_room):
    with pytest.raises(OSError, match="Too many open files"):
        _ = roster.board
    assert roster.in_flight_at(1) == 0
    roster.clear(1)
    assert roster.in_flight == 0
