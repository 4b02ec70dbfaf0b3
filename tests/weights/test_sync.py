import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.front.house import A, B
from tests.weights.desks import held
from tests.weights.syncs import (
    BUCKETS,
    COMPLETE,
    DESTROY,
    INIT,
    PREPARE,
    TENSORS,
    UPDATE,
    Engines,
    asks,
    init_body,
    store_of_a_trainer,
    uncertain,
)

pytestmark = pytest.mark.usefixtures("listening")


@pytest.fixture
def engines(monkeypatch):
    return Engines().install(monkeypatch)


# Whose it is


async def test_a_second_trainer_is_told_of_the_first_while_that_one_lives(trainer):
    await trainer.arm()
    async with store_of_a_trainer() as other:
        answer = await trainer.ask(INIT, **init_body(other, group_name="mine"))
    assert answer.status == 409
    for part in ("'g'", f"127.0.0.1:{trainer.store.port}", "step armed"):
        assert part in answer.body["message"]
    assert answer.body["owner"]["master"] == f"127.0.0.1:{trainer.store.port}"
    assert (await trainer.well(COMPLETE, weight_version="v2"))["weight_epoch"] == 1


async def test_force_takes_it_over(trainer, engines):
    await trainer.arm()
    async with store_of_a_trainer() as other:
        body = init_body(other, group_name="mine", force=True)
        assert (await trainer.ask(INIT, **body)).ok
        assert engines.bodies(DESTROY, A) == [{"group_name": "g"}]
        assert trainer.house.desk.sync.status()["owner"]["group_name"] == "mine"


async def test_a_trainer_that_dies_is_answered_for(trainer, engines):
    await trainer.arm()
    trainer.store.die()
    await trainer.until("idle")
    assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B) == [{"group_name": "g"}]
    answer = await trainer.ask(COMPLETE)
    assert answer.status == 400
    assert "the trainer is gone" in answer.body["message"]
    assert uncertain(trainer.house) == []
    async with store_of_a_trainer() as other:
        assert (await trainer.ask(INIT, **init_body(other))).ok


async def test_a_trainer_that_is_stopped_is_given_up_when_it_has_been_silent_for_too_long(trainer):
    await trainer.arm()
    trainer.store.silent = True
    await trainer.until("idle")
    assert "has not answered for 1 s" in trainer.house.desk.sync.status()["last_cause"]


async def test_a_trainer_that_dies_in_the_middle_of_its_parts_leaves_doubt(trainer):
    await trainer.join()
    await trainer.well(UPDATE, **TENSORS, flush_cache=False)
    trainer.store.die()
    await trainer.until("idle")
    assert uncertain(trainer.house) == [A, B]
    assert held(trainer.house) == [["uncertain"], ["uncertain"]]


async def test_its_end_does_not_wait_for_what_runs(trainer, engines, nursery):
    await trainer.arm()
    engines.shut(COMPLETE)
    nursery.start_soon(trainer.house.desk.submit, asks(COMPLETE))
    await engines.came[A, COMPLETE].wait()
    with trio.fail_after(15):
        asked = await trainer.ask(DESTROY)
    assert asked.ok
    assert trainer.state == "idle"


async def test_what_is_armed_is_disarmed_by_its_end(trainer, engines):
    await trainer.arm()
    await trainer.well(DESTROY)
    assert (trainer.state, uncertain(trainer.house)) == ("idle", [])
    assert not engines.bodies(COMPLETE, A)
    await trainer.join()


# Callers come and go


async def test_a_caller_that_leaves_stops_nothing_and_hears_it_later(trainer, engines):
    await trainer.arm()
    engines.shut(COMPLETE, B)
    with trio.move_on_after(0.1):
        await trainer.ask(COMPLETE, weight_version="v2")
    engines.open(COMPLETE, B)
    await trainer.until("grouped")
    await wait_all_tasks_blocked(0.01)
    told = await trainer.well(COMPLETE, weight_version="v2")
    assert told["weight_version"] == "v2"
    assert len(engines.bodies(COMPLETE, A)) == 1
    again = await trainer.ask(COMPLETE, weight_version="v3")
    assert again.status == 400


async def test_a_prepare_that_nobody_heard_is_answered_when_it_is_asked_again(trainer, engines):
    await trainer.join()
    engines.shut(PREPARE, B)
    with trio.move_on_after(0.1):
        await trainer.ask(PREPARE, **BUCKETS)
    engines.open(PREPARE, B)
    await trainer.until("armed")
    await wait_all_tasks_blocked(0.01)
    assert (await trainer.well(PREPARE, **BUCKETS))["status"] == "ready"
    assert len(engines.bodies(PREPARE, A)) == 1
