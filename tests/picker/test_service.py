import pytest
import trio

from omni_proxy.picker.picker import read_selection
from omni_proxy.picker.service import PickerService
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import entry
from tests.idle import wait_until_idle
from tests.picker.conftest import picker_over

CONFIG = "[picker]\nlease_secs = 10\n"


@pytest.fixture
async def fixture():
    picker_fixture = picker_over(entry("a"), entry("b"), config=CONFIG, clock=trio.current_time)
    picker_fixture.service = PickerService(picker_fixture.picker, lambda: picker_fixture.config)
    return picker_fixture


def reserve(fixture, body=b"{}"):
    return fixture.service.reserve(read_selection(body))


async def test_a_reservation_ends_with_its_lease_which_the_caller_can_set(
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
    with pytest.raises(HttpError) as expired:
        await fixture.service.release(short.reservation_id)
    assert expired.value.status == 404


async def test_an_id_of_the_caller_names_one_reservation_at_a_time(fixture):
    choice = await reserve(fixture, b'{"selection_id": "mine"}')
    assert choice.reservation_id == "mine"
    with pytest.raises(HttpError) as taken:
        await reserve(fixture, b'{"selection_id": "mine"}')
    assert (taken.value.status, choice.target.url in taken.value.message) == (409, True)
    await fixture.service.release("mine")
    assert fixture.counts == [0, 0]
    await reserve(fixture, b'{"selection_id": "mine"}')


async def test_a_reservation_keeps_nothing_of_its_body(fixture):
    choice = await reserve(fixture, b'{"request": {"messages": [], "prompt": "kept"}}')
    exchange = fixture.service._reservations.get(choice.reservation_id)
    assert (exchange.body, exchange.requirements.body_fields) == (b"", None)


async def test_a_selection_reserves_nothing(fixture):
    choice = await fixture.service.select(read_selection(b"{}"))
    assert (choice.reservation_id, fixture.counts) == (None, [0, 0])


async def test_the_end_of_the_service_releases_everything(fixture, nursery):
    await nursery.start(fixture.service.run)
    await reserve(fixture)
    nursery.cancel_scope.cancel()
    await wait_until_idle()
    assert fixture.counts == [0, 0]


def restore_at(fixture, records):
    targets = {target.url: target for target in fixture.fleet.targets()}
    fixture.service.restore(records, targets)


async def test_reservations_are_handed_to_the_successor_until_their_lease_ends(
    fixture, nursery, autojump_clock
):
    fixture.dataplane.services.inflight.in_flight = 0
    choice = await reserve(fixture, b'{"selection_id": "mine", "path": "/generate"}')
    records = fixture.service.hand_over("/next.sock")
    assert (fixture.service.successor, fixture.counts) == ("/next.sock", [0, 0])
    assert [(each.reservation_id, each.url) for each in records] == [("mine", choice.target.url)]
    successor = PickerService(fixture.picker, lambda: fixture.config)
    fixture.service = successor
    await nursery.start(successor.run)
    restore_at(fixture, records)
    assert [worker.in_flight for worker in fixture.fleet.workers if worker == choice.target] == [1]
    assert fixture.dataplane.services.inflight.in_flight == 1
    await trio.sleep(9)
    assert sum(fixture.counts) == 1
    await trio.sleep(1.1)
    assert (fixture.counts, successor.status()["expired"]) == ([0, 0], 1)
    assert fixture.dataplane.services.inflight.in_flight == 0


async def test_a_reservation_of_a_worker_that_the_successor_lacks_ends(fixture):
    await reserve(fixture, b'{"selection_id": "mine"}')
    records = fixture.service.hand_over("/next.sock")
    fixture.service.restore(records, {})
    assert (fixture.counts, fixture.service.status()["reservations"]) == ([0, 0], 0)


async def test_callers_wait_until_reservations_are_handed_over(fixture, nursery):
    await reserve(fixture, b'{"selection_id": "mine"}')
    records = fixture.service.hand_over("/next.sock")
    fixture.service = PickerService(fixture.picker, lambda: fixture.config)
    fixture.service.take_over()
    nursery.start_soon(fixture.service.release, "mine")
    await wait_until_idle()
    restore_at(fixture, records)
    await wait_until_idle()
    assert (fixture.counts, fixture.service.status()["reservations"]) == ([0, 0], 0)


async def test_a_reserved_rank_is_counted_with_its_worker():
    fixture = picker_over(entry("a", ranks=2), config=CONFIG)
    rank = next(target for target in fixture.fleet.targets() if target.worker is not target)
    exchange = fixture.picker.restore(rank, "/generate")
    assert (rank.in_flight, fixture.counts) == (1, [1])
    fixture.picker.release(exchange)
    assert (rank.in_flight, fixture.counts) == (0, [0])
