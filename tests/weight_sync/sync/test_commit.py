import pytest
import trio

from tests.admin_api.api_fixture import A, B
from tests.weight_sync.operation_fixture import PAUSE, admin_call, cordon_reasons_of
from tests.weight_sync.trainer_fixture import (
    BUCKETS,
    COMPLETE,
    CONTINUE,
    DESTROY,
    DISK,
    END,
    PREPARE,
    TENSORS,
    UPDATE,
    SyncEngines,
    uncertain_workers,
    versions_by_url,
)

pytestmark = pytest.mark.usefixtures("listening")
ENGINES = SyncEngines


# Rounds of several parts


async def test_parts_are_published_together_when_the_group_is_destroyed(trainer, engines):
    await trainer.join()
    for _ in range(3):
        await trainer.expect_ok(PREPARE, **TENSORS)
        body = await trainer.expect_ok(COMPLETE, flush_cache=False)
        assert "weight_epoch" not in body
        assert cordon_reasons_of(trainer.api) == [["updating"], ["updating"]]
        assert set(versions_by_url(trainer.api).values()) == {(None, 0)}
    engines.labels.update({A: "v2", B: "v2"})
    body = await trainer.expect_ok(DESTROY)
    assert (body["weight_epoch"], body["weight_version"]) == (1, "v2")
    assert cordon_reasons_of(trainer.api) == [[], []]
    assert versions_by_url(trainer.api) == {A: ("v2", 1), B: ("v2", 1)}


async def test_a_part_marked_as_last_is_published_at_continue(trainer):
    await trainer.join()
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=False)
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=True, weight_version="v2")
    assert trainer.api.operations.sync.status()["open"]
    body = await trainer.expect_ok(CONTINUE)
    assert body["weight_version"] == "v2"
    assert versions_by_url(trainer.api) == {A: ("v2", 1), B: ("v2", 1)}
    assert trainer.state == "grouped"


async def test_continue_between_parts_leaves_all_workers_uncertain(trainer):
    await trainer.join()
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=False)
    body = await trainer.expect_ok(CONTINUE)
    assert sorted(body["uncertain"]) == [A, B] == uncertain_workers(trainer.api)
    assert cordon_reasons_of(trainer.api) == [["uncertain"], ["uncertain"]]


async def test_end_weight_update_ends_the_round(trainer):
    await trainer.join()
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=False, weight_version="v2")
    body = await trainer.expect_ok(END)
    assert (body["weight_epoch"], versions_by_url(trainer.api)[A]) == (1, ("v2", 1))


async def test_a_part_that_one_participant_refuses_leaves_all_workers_uncertain(trainer, engines):
    await trainer.join()
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=False)
    engines.set_reply(B, UPDATE, {"success": False, "message": "no"}, 400)
    response = await trainer.ask(UPDATE, **TENSORS, flush_cache=False)
    assert response.body["message"] == f"{B}: status 400: no"
    await trainer.until("idle")
    assert uncertain_workers(trainer.api) == [A, B]
    assert trainer.api.operations.journal.published.epoch == 0


async def test_other_updates_are_refused_while_a_sync_is_open(trainer, engines):
    await trainer.join()
    assert (await trainer.ask(DISK, model_path="m")).ok
    await trainer.expect_ok(UPDATE, **TENSORS, flush_cache=False)
    response = await trainer.ask(DISK, model_path="m")
    assert response.status == 409
    assert "group 'g'" in response.body["message"]


async def test_other_updates_are_refused_while_participants_are_armed(trainer, engines):
    await trainer.arm()
    response = await trainer.ask(DISK, model_path="m")
    assert (response.status, engines.bodies(DISK, A)) == (409, [])
    assert "step armed" in response.body["message"]
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    await trainer.expect_ok(DISK, model_path="m")


# Recovery


async def test_an_uncertain_worker_recovers_when_all_failed_tensors_are_sent_again(
    trainer, engines
):
    engines.tensors = ("a", "b", "c")  # "c" is never sent, so it makes no worker uncertain
    await trainer.arm()
    engines.sums[B] = "other"
    assert not (await trainer.ask(COMPLETE, weight_version="v2")).ok
    engines.sums[B] = engines.sums[A]
    part = {"names": ["a"], "dtypes": ["uint8"], "shapes": [[1]]}
    await trainer.expect_ok(PREPARE, num_buckets=1, buckets=[part])
    await trainer.expect_ok(COMPLETE, weight_version="v3")
    assert uncertain_workers(trainer.api) == [A, B]
    await trainer.expect_ok(PREPARE, **BUCKETS)
    assert not engines.bodies(CONTINUE, A)
    await trainer.expect_ok(COMPLETE, weight_version="v4")
    assert uncertain_workers(trainer.api) == []
    assert cordon_reasons_of(trainer.api) == [[], []]
    # A failed call may have left its engine paused.
    assert engines.bodies(CONTINUE, A) == engines.bodies(CONTINUE, B) == [{}]


@pytest.mark.parametrize("paused", [False, True])
async def test_an_engine_left_paused_by_a_failed_part_continues_before_it_gets_requests(
    trainer, engines, paused
):
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    if paused:
        await trainer.api.operations.submit(admin_call(PAUSE))
    engines.set_reply(B, UPDATE, {"success": False, "message": "the trainer is gone"}, 400)
    assert not (await trainer.ask(UPDATE, **TENSORS)).ok
    await trainer.until("idle")
    with trio.fail_after(30):
        while uncertain_workers(trainer.api):  # noqa: ASYNC110  # nothing signals it
            await trio.sleep(0.01)
    # A caller requested this pause, so only a caller may end it.
    body = [] if paused else [{}]
    assert engines.bodies(CONTINUE, A) == engines.bodies(CONTINUE, B) == body


async def test_a_part_without_all_failed_tensors_recovers_no_worker(trainer, engines):
    engines.set_reply(A, DISK, {}, 500)
    engines.set_reply(B, DISK, {}, 500)
    assert not (await trainer.ask(DISK, model_path="m")).ok
    engines.tensors = ("a", "b", "c")
    await trainer.arm()
    await trainer.expect_ok(COMPLETE, weight_version="v2")
    assert uncertain_workers(trainer.api) == [A, B]
    engines.tensors = ("a", "b")
    await trainer.expect_ok(PREPARE, **BUCKETS)
    await trainer.expect_ok(COMPLETE, weight_version="v3")
    assert uncertain_workers(trainer.api) == []
