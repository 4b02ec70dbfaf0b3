import pytest
import trio

from omni_proxy.picker.pick_request import read_selection
from omni_proxy.picker.service import PickerService
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry
from tests.idle import wait_until_idle
from tests.picker.conftest import picker_over

CONFIG = "[picker]\nlease_secs = 10\n"


@pytest.fixture
async def fixture():
    made = picker_over(entry("a"), entry("b"), config=CONFIG, clock=trio.current_time)
    made.service = PickerService(made.picker, lambda: made.config)
    return made


def reserve(fixture, body=b"{}"):
    return fixture.service.reserve(read_selection(body))


async def test_a_reservation_ends_with_its_lease_and_the_callers_lease_wins(
    fixture, nursery, autojump_clock
):
    await nursery.start(fixture.service.run)
    await reserve(fixture)
    short = await reserve(fixture, b'{"lease_secs": 3}')
    assert fixture.counts == [1, 1]
    await trio.sleep(3.1)
    assert sum(fixture.counts) == 1
    await trio.sleep(7)
    assert fixture.counts == [0, 0]
    assert fixture.service.status() == {"reservations": 0, "expired": 2}
    with pytest.raises(HttpError) as gone:
        fixture.service.release(short.reservation_id)
    assert gone.value.status == 404


async def test_the_callers_id_is_the_reservations_and_names_one_at_a_time(fixture):
    choice = await reserve(fixture, b'{"selection_id": "mine"}')
    assert choice.reservation_id == "mine"
    with pytest.raises(HttpError) as taken:
        await reserve(fixture, b'{"selection_id": "mine"}')
    assert (taken.value.status, choice.target.url in taken.value.message) == (409, True)
    fixture.service.release("mine")
    assert fixture.counts == [0, 0]
    await reserve(fixture, b'{"selection_id": "mine"}')


async def test_a_selection_reserves_nothing(fixture):
    choice = await fixture.service.select(read_selection(b"{}"))
    assert (choice.reservation_id, fixture.counts) == (None, [0, 0])


async def test_the_end_of_the_service_releases_everything(fixture, nursery):
    await nursery.start(fixture.service.run)
    await reserve(fixture)
    nursery.cancel_scope.cancel()
    await wait_until_idle()
    assert fixture.counts == [0, 0]
