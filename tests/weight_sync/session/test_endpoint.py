import re
import socket

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.admin_api.house import A, B
from tests.weight_sync.desks import held
from tests.weight_sync.syncs import (
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
ENGINES = Engines


# Whose it is


async def test_a_second_trainer_is_told_of_the_first_while_that_one_lives(trainer):
    await trainer.arm()
    async with store_of_a_trainer() as other:
        answer = await trainer.ask(INIT, **init_body(other, group_name="mine"))
    assert answer.status == 409
    for part in ("'g'", f"127.0.0.1:{trainer.store.port}", "step armed"):
        assert part in answer.body["message"]
    assert answer.body["owner"]["master"] == f"127.0.0.1:{trainer.store.port}"
    assert re.search(r"begun \d+\.\d s ago", answer.body["message"])
    assert answer.body["owner"]["age_secs"] >= 0
    assert (await trainer.well(COMPLETE, weight_version="v2"))["weight_epoch"] == 1


async def test_one_whose_store_is_not_up_yet_is_not_taken_for_dead(trainer, engines):
    engines.shut(INIT)
    answers = []
    async with trio.open_nursery() as nursery:

        async def first():
            answers.append(await trainer.ask(INIT, **init_body(trainer.store, master_port=later)))

        with socket.socket() as unheard:  # bound, and nobody listens
            unheard.bind(("127.0.0.1", 0))
            later = unheard.getsockname()[1]
            nursery.start_soon(first)
            await engines.came[B, INIT].wait()
            answer = await trainer.ask(INIT, **init_body(trainer.store, group_name="mine"))
            assert (answer.status, "step joining" in answer.body["message"]) == (409, True)
            engines.open(INIT)
            await trainer.until("grouped")
    assert answers[0].ok, answers[0].body


async def test_force_takes_it_over(trainer, engines):
    await trainer.arm()
    async with store_of_a_trainer() as other:
        body = init_body(other, group_name="mine", force=True)
        assert (await trainer.ask(INIT, **body)).ok
        assert engines.bodies(DESTROY, A) == [{"group_name": "g"}]
        assert trainer.house.desk.sync.status()["owner"]["group_name"] == "mine"


@pytest.mark.parametrize("same", [True, False])
async def test_who_comes_before_its_death_was_noticed_takes_the_place_of_a_dead_one(
    trainer, engines, caplog, same
):
    await trainer.arm()
    trainer.house.desk.sync.life._watching.cancel()  # as if nobody had looked since
    trainer.store.die()
    port = trainer.store.port if same else 0
    async with store_of_a_trainer(port) as other:
        assert (other.port == trainer.store.port) is same
        assert (await trainer.ask(INIT, **init_body(other))).ok
        assert "replaced stale group: group 'g'" in caplog.text
        assert engines.bodies(DESTROY, A) == engines.bodies(DESTROY, B) == [{"group_name": "g"}]
        assert trainer.house.desk.sync.status()["owner"]["master"] == f"127.0.0.1:{other.port}"
        await trainer.well(PREPARE, **BUCKETS)


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


async def test_a_trainer_that_is_stopped_is_given_up_when_it_has_been_silent_for_too_long(
    trainer_with, store
):
    trainer = await trainer_with(stall_timeout_secs=1.0)
    await trainer.arm()
    store.silent = True
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
    with trio.fail_after(30):
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
