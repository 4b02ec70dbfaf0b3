import pytest

from tests.dataplane.queue_fixture import Room


@pytest.fixture
def room_of():
    rooms = []

    def build(*entries, **settings):
        rooms.append(Room(*entries, **settings))
        return rooms[-1]

    yield build
    for room in rooms:
        room.close()
