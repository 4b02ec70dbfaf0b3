"""How [weight_sync] settings affect requests and proofs in a sync, and the credentials of calls."""

from dataclasses import replace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import cordon_reasons_of
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    DESTROY,
    INIT,
    PREPARE,
    SyncEngines,
    init_body,
    trainer_call,
    uncertain_workers,
    versions_by_url,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = SyncEngines


async def test_requests_in_flight_are_drained_before_a_complete_is_forwarded(trainer_with, engines):
    trainer = await trainer_with(drain_secs=60.0)
    await trainer.arm()
    worker = trainer.api.worker(B)
    worker.in_flight = 1
    engines.close_gate(COMPLETE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.ask, COMPLETE)
        with trio.fail_after(20):
            while cordon_reasons_of(trainer.api) != [["updating"], ["updating"]]:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await trio.sleep(0.2)  # several polls of the drain
        assert not engines.bodies(COMPLETE, A) + engines.bodies(COMPLETE, B)
        assert trainer.state == "committing"
        worker.in_flight = 0
        await engines.arrived[B, COMPLETE].wait()
        engines.open_gate(COMPLETE)
    assert uncertain_workers(trainer.api) == []


async def test_with_while_updating_pass_no_worker_is_held_and_versions_are_unknown(
    trainer_with, engines
):
    trainer = await trainer_with(while_updating="pass")
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    assert set(versions_by_url(trainer.api).values()) == {("v2", 1)}
    await trainer.expect_ok(PREPARE, **BUCKETS)
    engines.close_gate(COMPLETE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.ask, COMPLETE)
        await engines.arrived[A, COMPLETE].wait()
        assert cordon_reasons_of(trainer.api) == [[], []]
        assert set(versions_by_url(trainer.api).values()) == {(None, 0)}
        engines.open_gate(COMPLETE)


async def test_with_verify_off_no_checksums_are_requested(trainer_with, engines):
    trainer = await trainer_with(verify="off")
    engines.sums[B] = "other"
    await trainer.arm()
    body = await trainer.expect_ok(COMPLETE, weight_version="v2")
    assert "/weights_checker" not in engines.paths(A) + engines.paths(B)
    assert body["verification"]["checked"] == []
    assert versions_by_url(trainer.api) == {A: ("v2", 1), B: ("v2", 1)}


async def test_every_call_to_a_replica_has_the_credentials_of_the_caller(trainer_with, engines):
    trainer = await trainer_with()
    for path, body in (
        (INIT, init_body(trainer.store)),
        (PREPARE, BUCKETS),
        (COMPLETE, {"weight_version": "v2"}),
        (DESTROY, {}),
    ):
        call = replace(trainer_call(path, **body), headers={"authorization": f"Bearer {path}"})
        assert (await trainer.api.operations.submit(call)).ok
    expected = {
        INIT: ("/server_info", INIT),
        PREPARE: (PREPARE,),
        COMPLETE: (COMPLETE, "/model_info", "/weights_checker"),
        DESTROY: (DESTROY,),
    }
    uncredentialed = ("/server_info", "/model_info")  # the proxy also calls these without a caller
    for trainer_path, paths in expected.items():
        for path in paths:
            requests = [r for r in engines.requests if r.url.path == path]
            keys = {request.headers.get("authorization") for request in requests}
            assert f"Bearer {trainer_path}" in keys, (path, keys)
            assert None not in keys or path in uncredentialed, path


async def test_no_weights_change_before_every_process_acknowledged_the_cordon(
    trainer_with, engines
):
    trainer = await trainer_with()
    await trainer.arm()
    awaited, acknowledged = trio.Event(), trio.Event()

    async def await_acknowledgement():
        awaited.set()
        await acknowledged.wait()

    trainer.api.fleet.await_replicated = await_acknowledgement
    engines.close_gate(COMPLETE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.ask, COMPLETE)
        await awaited.wait()
        await wait_all_tasks_blocked(0.01)
        assert cordon_reasons_of(trainer.api) == [["updating"], ["updating"]]
        assert not engines.bodies(COMPLETE, A) + engines.bodies(COMPLETE, B)
        acknowledged.set()
        await engines.arrived[A, COMPLETE].wait()
        engines.open_gate(COMPLETE)
