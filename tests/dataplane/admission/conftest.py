import pytest

from tests.dataplane.queue_fixture import Room


@pytest.fixture
def room_of():
    made = []

    def build(*entries, **more):
        made.append(Room(*entries, **more))
        return made[-1]

    yield build
    for room in made:
        room.close()
