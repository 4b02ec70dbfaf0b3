"""What [weight_sync] says of the requests and the proofs of a sync, and whose key calls carry."""

from dataclasses import replace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.admin_api.house import A, B
from tests.weight_sync.operation_fixture import held
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    DESTROY,
    INIT,
    PREPARE,
    Engines,
    asks,
    init_body,
    uncertain,
    versions,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = Engines


async def test_requests_in_flight_are_drained_before_a_complete_is_forwarded(trainer_with, engines):
    trainer = await trainer_with(drain_secs=60.0)
    await trainer.arm()
    worker = trainer.house.worker(B)
    worker.in_flight = 1
    engines.shut(COMPLETE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.ask, COMPLETE)
        with trio.fail_after(20):
            while held(trainer.house) != [["updating"], ["updating"]]:  # noqa: ASYNC110  # no bell
                await trio.sleep(0.01)
        await trio.sleep(0.2)  # a few looks at what runs
        assert not engines.bodies(COMPLETE, A) + engines.bodies(COMPLETE, B)
        assert trainer.state == "committing"
        worker.in_flight = 0
        await engines.came[B, COMPLETE].wait()
        engines.open(COMPLETE)
    assert uncertain(trainer.house) == []


async def test_with_while_updating_pass_no_worker_is_held_and_versions_are_unknown(
    trainer_with, engines
):
    trainer = await trainer_with(while_updating="pass")
    await trainer.arm()
    await trainer.well(COMPLETE, weight_version="v2")
    assert set(versions(trainer.house).values()) == {("v2", 1)}
    await trainer.well(PREPARE, **BUCKETS)
    engines.shut(COMPLETE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.ask, COMPLETE)
        await engines.came[A, COMPLETE].wait()
        assert held(trainer.house) == [[], []]
        assert set(versions(trainer.house).values()) == {(None, 0)}
        engines.open(COMPLETE)


async def test_with_verify_off_no_checksums_are_requested(trainer_with, engines):
    trainer = await trainer_with(verify="off")
    engines.sums[B] = "other"
    await trainer.arm()
    told = await trainer.well(COMPLETE, weight_version="v2")
    assert "/weights_checker" not in engines.paths(A) + engines.paths(B)
    assert told["verification"]["checked"] == []
    assert versions(trainer.house) == {A: ("v2", 1), B: ("v2", 1)}


async def test_every_call_to_a_replica_has_the_credentials_of_the_caller(trainer_with, engines):
    trainer = await trainer_with()
    for path, body in (
        (INIT, init_body(trainer.store)),
        (PREPARE, BUCKETS),
        (COMPLETE, {"weight_version": "v2"}),
        (DESTROY, {}),
    ):
        call = replace(asks(path, **body), headers={"authorization": f"Bearer {path}"})
        assert (await trainer.house.desk.submit(call)).ok
    expected = {
        INIT: ("/server_info", INIT),
        PREPARE: (PREPARE,),
        COMPLETE: (COMPLETE, "/model_info", "/weights_checker"),
        DESTROY: (DESTROY,),
    }
    looks = ("/server_info", "/model_info")  # we ask for these without being asked, too
    for asked_for, paths in expected.items():
        for path in paths:
            found = [r for r in engines.asked if r.url.path == path]
            keys = {r.headers.get("authorization") for r in found}
            assert f"Bearer {asked_for}" in keys, (path, keys)
            assert None not in keys or path in looks, path


async def test_no_weights_change_before_every_process_knows_that_a_replica_is_held(
    trainer_with, engines
):
    trainer = await trainer_with()
    await trainer.arm()
    asked, all_know = trio.Event(), trio.Event()

    async def agreed():
        asked.set()
        await all_know.wait()

    trainer.house.fleet.await_replicated = agreed
    engines.shut(COMPLETE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.ask, COMPLETE)
        await asked.wait()
        await wait_all_tasks_blocked(0.01)
        assert held(trainer.house) == [["updating"], ["updating"]]
        assert not engines.bodies(COMPLETE, A) + engines.bodies(COMPLETE, B)
        all_know.set()
        await engines.came[A, COMPLETE].wait()
        engines.open(COMPLETE)
