import re
import socket

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
    TENSORS,
    UPDATE,
    SyncEngines,
    init_body,
    open_trainer_store,
    trainer_call,
    uncertain_workers,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = SyncEngines


# Ownership


async def test_a_second_trainer_is_refused_while_the_first_is_alive(trainer):
    await trainer.arm()
    async with open_trainer_store() as other:
        response = await trainer.ask(INIT, **init_body(other, group_name="mine"))
    assert response.status == 409
    for part in ("'g'", f"127.0.0.1:{trainer.store.port}", "step armed"):
        assert part in response.body["message"]
    assert response.body["owner"]["master"] == f"127.0.0.1:{trainer.store.port}"
    assert re.search(r"begun \d+\.\d s ago", response.body["message"])
    assert response.body["owner"]["age_secs"] >= 0
    assert (await trainer.expect_ok(COMPLETE, weight_version="v2"))["weight_epoch"] == 1


async def test_a_trainer_whose_store_is_still_starting_is_alive(trainer, engines):
    engines.close_gate(INIT)
    responses = []
    async with trio.open_nursery() as nursery:

        async def first():
            responses.append(
                await trainer.ask(INIT, **init_body(trainer.store, master_port=unopened_port))
            )

        with socket.socket() as bound:  # not listening yet
            bound.bind(("127.0.0.1", 0))
            unopened_port = bound.getsockname()[1]
            nursery.start_soon(first)
            await engines.arrived[B, INIT].wait()
            response = await trainer.ask(INIT, **init_body(trainer.store, group_name="mine"))
            assert (response.status, "step joining" in response.body["message"]) == (409, True)
            engines.open_gate(INIT)
            await trainer.until("grouped")
    assert responses[0].ok, responses[0].body


async def test_an_init_with_force_takes_the_group_over(trainer, engines):
    await trainer.arm()
    async with open_trainer_store() as other:
        body = init_body(other, group_name="mine", force=True)
        assert (await trainer.ask(INIT, **body)).ok
        assert engines.bodies(DESTROY, A) == [{"group_name": "g"}]
        assert trainer.api.operations.sync.status()["owner"]["group_name"] == "mine"


@pytest.mark.parametrize("same_port", [True, False])
async def test_a_new_trainer_replaces_a_dead_one_before_the_watchdog_notices(
    trainer, engines, caplog, same_port
):
    await trainer.arm()
    trainer.api.operations.sync.lifecycle._watching.cancel()  # disable the watchdog
    trainer.store.die()
    port = trainer.store.port if same_port else 0
    async with open_trainer_store(port) as other:
        assert (other.port == trainer.store.port) is same_port
        assert (await trainer.ask(INIT, **init_body(other))).ok
        assert "stale_group_replaced sync=group 'g'" in caplog.text
        assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B) == [{"group_name": "g"}]
        assert trainer.api.operations.sync.status()["owner"]["master"] == f"127.0.0.1:{other.port}"
        await trainer.expect_ok(PREPARE, **BUCKETS)


async def test_a_dead_trainer_ends_the_sync(trainer, engines):
    await trainer.arm()
    trainer.store.die()
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B) == [{"group_name": "g"}]
    response = await trainer.ask(COMPLETE)
    assert response.status == 400
    assert "the trainer is gone" in response.body["message"]
    assert uncertain_workers(trainer.api) == []
    async with open_trainer_store() as other:
        assert (await trainer.ask(INIT, **init_body(other))).ok


async def test_a_stopped_trainer_ends_the_sync_after_the_stall_timeout(trainer_with, store):
    trainer = await trainer_with(stall_timeout_secs=1.0)
    await trainer.arm()
    store.silent = True
    await trainer.until("idle")
    assert "has not answered for 1 s" in trainer.api.operations.sync.status()["last_cause"]


async def test_a_trainer_that_dies_between_parts_leaves_workers_uncertain(trainer):
    await trainer.join()
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=False)
    trainer.store.die()
    await trainer.until("idle")
    assert uncertain_workers(trainer.api) == [A, B]
    assert cordon_reasons_of(trainer.api) == [["uncertain"], ["uncertain"]]


async def test_a_destroy_interrupts_the_running_step(trainer, engines, nursery):
    await trainer.arm()
    engines.close_gate(COMPLETE)
    nursery.start_soon(trainer.api.operations.submit, trainer_call(COMPLETE))
    await engines.arrived[A, COMPLETE].wait()
    with trio.fail_after(30):
        response = await trainer.ask(DESTROY)
    assert response.ok
    assert trainer.state == "idle"


async def test_a_destroy_disarms_armed_participants(trainer, engines):
    await trainer.arm()
    await trainer.expect_ok(DESTROY)
    assert (trainer.state, uncertain_workers(trainer.api)) == ("idle", [])
    assert not engines.bodies(COMPLETE, A)
    await trainer.join()


# Callers that disconnect


async def test_a_caller_that_disconnects_cancels_nothing_and_gets_the_result_later(
    trainer, engines
):
    await trainer.arm()
    engines.close_gate(COMPLETE, B)
    with trio.move_on_after(0.1):
        await trainer.ask(COMPLETE, weight_version="v2")
    engines.open_gate(COMPLETE, B)
    await trainer.until("grouped")
    await wait_all_tasks_blocked(0.01)
    body = await trainer.expect_ok(COMPLETE, weight_version="v2")
    assert body["weight_version"] == "v2"
    assert len(engines.bodies(COMPLETE, A)) == 1
    again = await trainer.ask(COMPLETE, weight_version="v3")
    assert again.status == 400


async def test_a_prepare_without_a_waiting_caller_is_answered_when_repeated(trainer, engines):
    await trainer.join()
    engines.close_gate(PREPARE, B)
    with trio.move_on_after(0.1):
        await trainer.ask(PREPARE, **BUCKETS)
    engines.open_gate(PREPARE, B)
    await trainer.until("armed")
    await wait_all_tasks_blocked(0.01)
    assert (await trainer.expect_ok(PREPARE, **BUCKETS))["status"] == "ready"
    assert len(engines.bodies(PREPARE, A)) == 1
