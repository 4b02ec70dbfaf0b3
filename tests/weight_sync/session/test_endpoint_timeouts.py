"""Each step of a sync ends by a deadline of its own, with an answer, and leaves nothing armed."""

import pytest
import trio

from omni_proxy.config.schema import AdminConfig
from omni_proxy.weight_sync.session import steps
from tests.admin_api.house import A, B
from tests.weight_sync.operation_fixture import held, house_with
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    DESTROY,
    PREPARE,
    TENSORS,
    UPDATE,
    Engines,
    Trainer,
    sync_house,
    uncertain,
    versions,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = Engines
SHORT_SECS = 0.2


async def test_a_member_that_is_not_ready_in_time_is_named_and_all_are_disarmed(
    trainer_with, engines
):
    trainer = await trainer_with(ready_timeout_secs=SHORT_SECS)
    await trainer.join()
    engines.shut(PREPARE, B)
    answer = await trainer.ask(PREPARE, **BUCKETS)
    assert answer.status == 502
    assert f"no answer within {SHORT_SECS:g} s: {B}" in answer.body["message"]
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B) == [{"group_name": "g"}]
    assert len(engines.bodies(PREPARE, B)) == 1
    assert uncertain(trainer.house) == []
    del engines.gates[B, PREPARE], engines.came[B, PREPARE]
    await trainer.arm()


@pytest.mark.parametrize("path", [COMPLETE, UPDATE])
async def test_weights_that_do_not_arrive_in_time_end_the_step_once(trainer_with, engines, path):
    trainer = await trainer_with(receive_timeout_secs=SHORT_SECS)
    await (trainer.arm() if path == COMPLETE else trainer.join())
    engines.shut(path)
    with trio.fail_after(15):
        answer = await trainer.ask(path, **TENSORS)
    assert answer.status == 502
    assert f"no answer within {SHORT_SECS:g} s: {A}, {B}" in answer.body["message"]
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A)
    assert [len(engines.bodies(path, url)) for url in (A, B)] == [1, 1]
    # Nobody has said what it holds now.
    assert uncertain(trainer.house) == [A, B]
    assert held(trainer.house) == [["uncertain"], ["uncertain"]]


async def test_a_refusal_after_the_timeout_leaves_no_worker_uncertain(trainer_with, engines):
    """As replicas answer that are told to leave while they wait for bytes."""
    trainer = await trainer_with(receive_timeout_secs=SHORT_SECS)
    await trainer.arm()
    engines.shut(COMPLETE)
    before = versions(trainer.house)
    for url in (A, B):
        engines.tell(url, COMPLETE, {"success": False, "message": "the group is gone"}, 400)
    leaving = engines.keep

    async def keep(request, url, path):
        if path == DESTROY:
            engines.open(COMPLETE)
        return await leaving(request, url, path)

    engines.keep = keep
    answer = await trainer.ask(COMPLETE)
    assert answer.status in (400, 502)
    assert f"no answer within {SHORT_SECS:g} s" in answer.body["message"]
    await trainer.until("idle")
    assert (uncertain(trainer.house), versions(trainer.house)) == ([], before)


async def test_a_timeout_of_zero_never_ends_a_step(folder, nursery, store, engines, monkeypatch):
    monkeypatch.setattr(steps, "GRACE_SECS", 0.05)
    sync = sync_house(folder, receive_timeout_secs=0, ready_timeout_secs=0, init_timeout_secs=0)
    house = house_with(
        folder / "own",
        weight_sync=sync.config_store.config.weight_sync,
        admin=AdminConfig(worker_timeout_secs=0.05),
    )
    await nursery.start(house.desk.run)
    trainer = Trainer(house, store)
    for path, body in (
        ("/init_weights_update_group", None),
        (PREPARE, BUCKETS),
        (COMPLETE, {"weight_version": "v2"}),
        (UPDATE, {**TENSORS, "weight_version": "v3"}),
    ):
        engines.shut(path, B)
        answers = []
        async with trio.open_nursery() as asking:

            async def ask(path=path, body=body, answers=answers):
                told = trainer.init() if body is None else trainer.ask(path, **body)
                answers.append(await told)

            asking.start_soon(ask)
            await engines.came[B, path].wait()
            await trio.sleep(0.3)  # several times as long as the clock that must not count
            assert not answers, (path, answers)
            assert not engines.bodies(DESTROY, B), path
            engines.open(path, B)
        assert answers[0].ok, (path, answers[0].body)


async def test_a_running_step_ends_when_the_trainer_dies(trainer_with, engines):
    trainer = await trainer_with()
    await trainer.arm()
    engines.shut(COMPLETE)
    answers = []
    async with trio.open_nursery() as nursery:

        async def complete():
            answers.append(await trainer.ask(COMPLETE))

        nursery.start_soon(complete)
        await engines.came[A, COMPLETE].wait()
        trainer.store.die()
    assert answers[0].status == 400
    assert "the trainer is gone" in answers[0].body["message"]
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B)
