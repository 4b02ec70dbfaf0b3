import pytest
import trio

from omni_proxy.config.flags import Startup
from omni_proxy.config.overlay import with_deleted, with_override, with_pending_delete
from omni_proxy.fleet.registry import Fleet
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.worker_drain import WorkerDrains

A, B = "http://a:1", "http://b:1"


class DrainFixture:
    def __init__(self, file):
        self.fleet = Fleet()
        self.config_store = ConfigStore(Startup(file, {}, (), ""), self.fleet)
        self.drains = WorkerDrains(self.fleet, self.config_store)
        self.config_store.start()
        self.a = self.fleet.workers[0]

    async def switch(self, *, disabled, at_once=False):
        def edit(state, _):
            return with_override(state, A, disabled=disabled)

        await self.config_store.change(edit, at_once=at_once)

    async def start(self, secs=0.0, *, at_once=False, **more):
        await self.switch(disabled=True, at_once=at_once)
        return self.drains.start(self.a, secs, **more)

    def state(self):
        record = self.drains.get_record(self.a)
        return record and record["state"]


@pytest.fixture
async def world(tmp_path, nursery):
    file = tmp_path / "proxy.toml"
    file.write_text(f'[[workers]]\nurl = "{A}"\n[[workers]]\nurl = "{B}"\n')
    made = DrainFixture(file)
    await nursery.start(made.drains.run)
    return made


async def test_a_worker_with_nothing_in_flight_is_drained_at_once(autojump_clock, world):
    drain = await world.start()
    assert drain.over.is_set()
    assert world.state() == "drained"


async def test_a_drain_ends_with_the_last_request(autojump_clock, world):
    world.a.in_flight = 2
    drain = await world.start(60)
    record = world.drains.get_record(world.a)
    assert (record["state"], record["in_flight"], record["remove"]) == ("draining", 2, False)
    assert record["since"] < record["deadline"]
    world.a.in_flight = 1
    await trio.sleep(5)
    assert not drain.over.is_set()
    world.a.in_flight = 0
    await drain.over.wait()
    assert (world.state(), drain.in_time) == ("drained", True)
    assert world.a.disabled


async def test_the_deadline_ends_a_drain_and_aborts_no_request(autojump_clock, world):
    world.a.in_flight = 1
    drain = await world.start(3)
    started_at = trio.current_time()
    await drain.over.wait()
    assert trio.current_time() - started_at == pytest.approx(3, abs=0.2)
    assert (world.state(), world.a.in_flight, world.a.disabled) == ("overdue", 1, True)
    world.a.in_flight = 0
    assert world.state() == "drained"


async def test_without_a_deadline_a_drain_has_no_limit(autojump_clock, world):
    world.a.in_flight = 1
    drain = await world.start(0)
    await trio.sleep(20)
    assert not drain.over.is_set()
    assert world.drains.get_record(world.a)["deadline"] is None
    assert world.drains.secs_left(world.a) is None
    world.a.in_flight = 0
    await drain.over.wait()


async def test_a_second_drain_moves_the_deadline(autojump_clock, world):
    world.a.in_flight = 1
    first = await world.start(3)
    assert world.drains.start(world.a, 50) is first
    await trio.sleep(10)
    assert world.state() == "draining"
    assert world.drains.secs_left(world.a) == pytest.approx(40, abs=0.2)


async def test_enabling_the_worker_cancels_the_drain(autojump_clock, world):
    world.a.in_flight = 1
    drain = await world.start(60, remove=True)
    await world.switch(disabled=False)
    assert (drain.over.is_set(), drain.state) == (True, "cancelled")
    assert world.drains.get_record(world.a) is None
    world.a.in_flight = 0
    await trio.sleep(60)
    assert world.fleet.find(A) is world.a


@pytest.mark.parametrize(("left", "in_time"), [(0, True), (1, False)])
async def test_a_removal_happens_at_the_end_of_the_drain(autojump_clock, world, left, in_time):
    world.a.in_flight = 1
    drain = await world.start(5, remove=True)
    await trio.sleep(1)
    assert world.fleet.find(A) is world.a
    world.a.in_flight = left
    await drain.over.wait()
    assert world.fleet.find(A) is None
    assert (drain.state, drain.in_time) == ("removed", in_time)
    assert world.drains.get_record(world.a) is None


async def test_a_worker_that_is_removed_meanwhile_ends_the_drain(autojump_clock, world):
    world.a.in_flight = 1
    drain = await world.start(60)
    await world.config_store.change(lambda state, config: with_deleted(state, config, A))
    assert (drain.over.is_set(), drain.state) == (True, "removed")


async def test_two_workers_drain_at_the_same_time(autojump_clock, world):
    b = world.fleet.find(B)
    world.a.in_flight = b.in_flight = 1
    slow = await world.start(0)
    await world.config_store.change(lambda state, _: with_override(state, B, disabled=True))
    fast = world.drains.start(b, 2)
    await fast.over.wait()
    assert not slow.over.is_set()


async def test_a_removal_that_waits_for_the_operation_lock_delays_no_other_drain(
    autojump_clock, world
):
    b = world.fleet.find(B)
    async with world.config_store.operation_lock:
        goes = await world.start(60, remove=True, at_once=True)
        b.in_flight = 1
        stays = world.drains.start(b, 5)
        with trio.fail_after(10):
            await stays.over.wait()
        assert (stays.state, goes.state) == ("overdue", "draining")
        assert world.fleet.find(A) is world.a
    await goes.over.wait()
    assert (goes.state, goes.in_time, world.fleet.find(A)) == ("removed", True, None)


async def restarted(world, nursery):
    """The program after a restart: it knows what is on the disk."""
    again = DrainFixture(world.config_store.file)
    again.a.in_flight = 0
    await nursery.start(again.drains.run)
    return again


async def request_removal(world):
    await world.config_store.change(lambda state, _: with_pending_delete(state, A))
    return world.drains.start(world.a, 0, remove=True)


async def test_a_removal_that_a_restart_interrupted_is_finished_after_it(
    autojump_clock, world, nursery
):
    world.a.in_flight = 1
    await request_removal(world)
    again = await restarted(world, nursery)
    with trio.fail_after(10):
        while again.fleet.find(A) is not None:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert again.config_store.state.leaving == ()
    assert again.fleet.find(B) is not None


async def test_a_worker_that_was_enabled_before_the_restart_stays(autojump_clock, world, nursery):
    world.a.in_flight = 1
    await request_removal(world)
    await world.switch(disabled=False)
    again = await restarted(world, nursery)
    await trio.sleep(5)
    assert again.fleet.find(A) is again.a
    assert (again.a.disabled, again.drains.get_record(again.a)) == (False, None)


async def test_a_drain_without_removal_leaves_its_worker_disabled_after_a_restart(
    autojump_clock, world, nursery
):
    world.a.in_flight = 1
    await world.start(0)
    again = await restarted(world, nursery)
    await trio.sleep(5)
    assert again.fleet.find(A) is again.a
    assert again.a.disabled
