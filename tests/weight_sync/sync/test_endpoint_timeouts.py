"""Each step of a sync has its own timeout, ends with a response, and leaves nothing armed."""

import pytest
import trio

from omni_proxy.config.schema import AdminConfig
from omni_proxy.weight_sync.sync import steps
from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import api_with, cordon_reasons_of
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    DESTROY,
    PREPARE,
    TENSORS,
    UPDATE,
    SyncEngines,
    Trainer,
    sync_api,
    uncertain_workers,
    versions_by_url,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = SyncEngines
SHORT_SECS = 0.2


async def test_a_participant_that_is_not_ready_in_time_is_named_and_all_are_disarmed(
    trainer_with, engines
):
    trainer = await trainer_with(ready_timeout_secs=SHORT_SECS)
    await trainer.join()
    engines.close_gate(PREPARE, B)
    response = await trainer.ask(PREPARE, **BUCKETS)
    assert response.status == 502
    assert f"no answer within {SHORT_SECS:g} s: {B}" in response.body["message"]
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B) == [{"group_name": "g"}]
    assert len(engines.bodies(PREPARE, B)) == 1
    assert uncertain_workers(trainer.api) == []
    del engines.gates[B, PREPARE], engines.arrived[B, PREPARE]
    await trainer.arm()


@pytest.mark.parametrize("path", [COMPLETE, UPDATE])
async def test_weights_that_do_not_arrive_in_time_end_the_step_once(trainer_with, engines, path):
    trainer = await trainer_with(receive_timeout_secs=SHORT_SECS)
    await (trainer.arm() if path == COMPLETE else trainer.join())
    engines.close_gate(path)
    with trio.fail_after(15):
        response = await trainer.ask(path, **TENSORS)
    assert response.status == 502
    assert f"no answer within {SHORT_SECS:g} s: {A}, {B}" in response.body["message"]
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A)
    assert [len(engines.bodies(path, url)) for url in (A, B)] == [1, 1]
    # Their weights are unknown.
    assert uncertain_workers(trainer.api) == [A, B]
    assert cordon_reasons_of(trainer.api) == [["uncertain"], ["uncertain"]]


async def test_a_refusal_after_the_timeout_leaves_no_worker_uncertain(trainer_with, engines):
    """Replicas respond so to a destroy while they wait for bytes."""
    trainer = await trainer_with(receive_timeout_secs=SHORT_SECS)
    await trainer.arm()
    engines.close_gate(COMPLETE)
    before = versions_by_url(trainer.api)
    for url in (A, B):
        engines.set_reply(url, COMPLETE, {"success": False, "message": "the group is gone"}, 400)
    respond = engines.respond

    async def open_gate_on_destroy(request, url, path):
        if path == DESTROY:
            engines.open_gate(COMPLETE)
        return await respond(request, url, path)

    engines.respond = open_gate_on_destroy
    response = await trainer.ask(COMPLETE)
    assert response.status in (400, 502)
    assert f"no answer within {SHORT_SECS:g} s" in response.body["message"]
    await trainer.until("idle")
    assert (uncertain_workers(trainer.api), versions_by_url(trainer.api)) == ([], before)


async def test_a_timeout_of_zero_never_ends_a_step(folder, nursery, store, engines, monkeypatch):
    monkeypatch.setattr(steps, "GRACE_SECS", 0.05)
    sync = sync_api(folder, receive_timeout_secs=0, ready_timeout_secs=0, init_timeout_secs=0)
    api = api_with(
        folder / "own",
        weight_sync=sync.config_store.config.weight_sync,
        admin=AdminConfig(worker_timeout_secs=0.05),
    )
    await nursery.start(api.operations.run)
    trainer = Trainer(api, store)
    for path, body in (
        ("/init_weights_update_group", None),
        (PREPARE, BUCKETS),
        (COMPLETE, {"weight_version": "v2"}),
        (UPDATE, {**TENSORS, "weight_version": "v3"}),
    ):
        engines.close_gate(path, B)
        responses = []
        async with trio.open_nursery() as caller:

            async def ask(path=path, body=body, responses=responses):
                pending = trainer.init() if body is None else trainer.ask(path, **body)
                responses.append(await pending)

            caller.start_soon(ask)
            await engines.arrived[B, path].wait()
            await trio.sleep(0.3)  # several times the timeout that must not apply
            assert not responses, (path, responses)
            assert not engines.bodies(DESTROY, B), path
            engines.open_gate(path, B)
        assert responses[0].ok, (path, responses[0].body)


async def test_a_running_step_ends_when_the_trainer_dies(trainer_with, engines):
    trainer = await trainer_with()
    await trainer.arm()
    engines.close_gate(COMPLETE)
    responses = []
    async with trio.open_nursery() as nursery:

        async def complete():
            responses.append(await trainer.ask(COMPLETE))

        nursery.start_soon(complete)
        await engines.arrived[A, COMPLETE].wait()
        trainer.store.die()
    assert responses[0].status == 400
    assert "the trainer is gone" in responses[0].body["message"]
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B)
