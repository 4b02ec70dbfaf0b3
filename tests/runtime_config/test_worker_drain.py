import pytest
import trio

from omni_proxy.config.configuration_flags import Startup
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

    async def start(self, secs=0.0, *, at_once=False, **options):
        await self.switch(disabled=True, at_once=at_once)
        return self.drains.start(self.a, secs, **options)

    def state(self):
        record = self.drains.get_record(self.a)
        return record and record["state"]


@pytest.fixture
async def draining(tmp_path, nursery):
    file = tmp_path / "proxy.toml"
    file.write_text(f'[[workers]]\nurl = "{A}"\n[[workers]]\nurl = "{B}"\n')
    fixture = DrainFixture(file)
    await nursery.start(fixture.drains.run)
    return fixture


async def test_a_worker_without_requests_is_drained_at_once(autojump_clock, draining):
    drain = await draining.start()
    assert drain.over.is_set()
    assert draining.state() == "drained"


async def test_a_drain_ends_with_the_last_request(autojump_clock, draining):
    draining.a.in_flight = 2
    drain = await draining.start(60)
    record = draining.drains.get_record(draining.a)
    assert (record["state"], record["in_flight"], record["remove"]) == ("draining", 2, False)
    assert record["since"] < record["deadline"]
    draining.a.in_flight = 1
    await trio.sleep(5)
    assert not drain.over.is_set()
    draining.a.in_flight = 0
    await drain.over.wait()
    assert (draining.state(), drain.in_time) == ("drained", True)
    assert draining.a.disabled


async def test_the_deadline_ends_a_drain_and_aborts_no_request(autojump_clock, draining):
    draining.a.in_flight = 1
    drain = await draining.start(3)
    started_at = trio.current_time()
    await drain.over.wait()
    assert trio.current_time() - started_at == pytest.approx(3, abs=0.2)
    assert (draining.state(), draining.a.in_flight, draining.a.disabled) == ("overdue", 1, True)
    draining.a.in_flight = 0
    assert draining.state() == "drained"


async def test_without_a_deadline_a_drain_has_no_limit(autojump_clock, draining):
    draining.a.in_flight = 1
    drain = await draining.start(0)
    await trio.sleep(20)
    assert not drain.over.is_set()
    assert draining.drains.get_record(draining.a)["deadline"] is None
    assert draining.drains.secs_left(draining.a) is None
    draining.a.in_flight = 0
    await drain.over.wait()


async def test_a_second_drain_moves_the_deadline(autojump_clock, draining):
    draining.a.in_flight = 1
    first = await draining.start(3)
    assert draining.drains.start(draining.a, 50) is first
    await trio.sleep(10)
    assert draining.state() == "draining"
    assert draining.drains.secs_left(draining.a) == pytest.approx(40, abs=0.2)


async def test_enabling_the_worker_cancels_the_drain(autojump_clock, draining):
    draining.a.in_flight = 1
    drain = await draining.start(60, remove=True)
    await draining.switch(disabled=False)
    assert (drain.over.is_set(), drain.state) == (True, "cancelled")
    assert draining.drains.get_record(draining.a) is None
    draining.a.in_flight = 0
    await trio.sleep(60)
    assert draining.fleet.find(A) is draining.a


@pytest.mark.parametrize(("in_flight", "in_time"), [(0, True), (1, False)])
async def test_a_removal_happens_at_the_end_of_the_drain(
    autojump_clock, draining, in_flight, in_time
):
    draining.a.in_flight = 1
    drain = await draining.start(5, remove=True)
    await trio.sleep(1)
    assert draining.fleet.find(A) is draining.a
    draining.a.in_flight = in_flight
    await drain.over.wait()
    assert draining.fleet.find(A) is None
    assert (drain.state, drain.in_time) == ("removed", in_time)
    assert draining.drains.get_record(draining.a) is None


async def test_the_removal_of_a_worker_ends_its_drain(autojump_clock, draining):
    draining.a.in_flight = 1
    drain = await draining.start(60)
    await draining.config_store.change(lambda state, config: with_deleted(state, config, A))
    assert (drain.over.is_set(), drain.state) == (True, "removed")


async def test_two_workers_drain_at_the_same_time(autojump_clock, draining):
    b = draining.fleet.find(B)
    draining.a.in_flight = b.in_flight = 1
    slow = await draining.start(0)
    await draining.config_store.change(lambda state, _: with_override(state, B, disabled=True))
    fast = draining.drains.start(b, 2)
    await fast.over.wait()
    assert not slow.over.is_set()


async def test_a_removal_that_waits_for_the_operation_lock_delays_no_other_drain(
    autojump_clock, draining
):
    b = draining.fleet.find(B)
    async with draining.config_store.operation_lock:
        removal = await draining.start(60, remove=True, at_once=True)
        b.in_flight = 1
        other = draining.drains.start(b, 5)
        with trio.fail_after(10):
            await other.over.wait()
        assert (other.state, removal.state) == ("overdue", "draining")
        assert draining.fleet.find(A) is draining.a
    await removal.over.wait()
    assert (removal.state, removal.in_time, draining.fleet.find(A)) == ("removed", True, None)


async def restarted(draining, nursery):
    """The program after a restart, with the state on disk."""
    again = DrainFixture(draining.config_store.file)
    again.a.in_flight = 0
    await nursery.start(again.drains.run)
    return again


async def request_removal(draining):
    await draining.config_store.change(lambda state, _: with_pending_delete(state, A))
    return draining.drains.start(draining.a, 0, remove=True)


async def test_a_removal_that_a_restart_interrupts_is_finished_afterwards(
    autojump_clock, draining, nursery
):
    draining.a.in_flight = 1
    await request_removal(draining)
    again = await restarted(draining, nursery)
    with trio.fail_after(10):
        while again.fleet.find(A) is not None:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert again.config_store.state.leaving == ()
    assert again.fleet.find(B) is not None


async def test_a_worker_that_was_enabled_before_the_restart_stays(
    autojump_clock, draining, nursery
):
    draining.a.in_flight = 1
    await request_removal(draining)
    await draining.switch(disabled=False)
    again = await restarted(draining, nursery)
    await trio.sleep(5)
    assert again.fleet.find(A) is again.a
    assert (again.a.disabled, again.drains.get_record(again.a)) == (False, None)


async def test_a_drain_without_removal_leaves_its_worker_disabled_after_a_restart(
    autojump_clock, draining, nursery
):
    draining.a.in_flight = 1
    await draining.start(0)
    again = await restarted(draining, nursery)
    await trio.sleep(5)
    assert again.fleet.find(A) is again.a
    assert again.a.disabled
