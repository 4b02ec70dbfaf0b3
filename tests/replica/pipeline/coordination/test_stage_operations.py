import pytest
import trio
import trio.testing

from omni_proxy.replica.pipeline.config import compile_plan
from omni_proxy.replica.pipeline.coordination.stage_operations import StageOperations
from omni_proxy.replica.pipeline.messages import Admin, AdminResult
from omni_proxy.replica.pipeline.requests import RequestFailed
from tests.replica.pipeline.pipeline_stages import pipeline, stage

PLAN = compile_plan(
    pipeline(
        stage("pre", next=("decode",)),
        stage("decode", terminal=True, next=("talk",)),
        stage("talk", terminal=True),
    )
)
READY = {
    "pre": {"supports_admin": False},
    "decode": {"supports_admin": True},
    "talk": {"supports_admin": True},
}


class Stages:
    """Answers when the test calls for it."""

    def __init__(self):
        self.orders = []
        self.operations = StageOperations(lambda name, message: self.orders.append((name, message)))

    def answer(self, name, success=True, **keys):
        order = self.orders[-1][1]
        keys = {"message": "told", "data": {"of": name}, **keys}
        self.operations.receive(AdminResult(order.op_id, name, order.action, success, **keys))


@pytest.fixture
def stages():
    return Stages()


async def asked(stages, action="model_info", payload=None, chosen=None, timeout_s=None):
    """Start an operation; returns a list that gets its outcome."""
    names = stages.operations.select_stages(chosen, PLAN)
    return await stages.operations.run(Admin("", action, payload or {}, timeout_s), names, READY)


async def run(stages, answers, *words, **keys):
    outcome = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask():
            outcome.append(await asked(stages, *words, **keys))

        await trio.testing.wait_all_tasks_blocked()
        for name, success, reported in answers:
            stages.answer(name, success, **reported)
    return outcome[0]


async def test_results_are_in_arrival_order_after_unsupported_stages(stages):
    body = await run(stages, [("talk", True, {"rank": 0}), ("decode", True, {})])
    assert (body["success"], body["message"], body["action"]) == (True, "ok", "model_info")
    assert [result["stage"] for result in body["results"]] == ["pre", "talk", "decode"]
    assert body["results"][0] == {
        "op_id": body["op_id"],
        "stage": "pre",
        "action": "model_info",
        "success": True,
        "message": "stage does not support admin operations",
        "data": {"skipped": True, "unsupported": True},
        "error": None,
        "rank": None,
        "role": "single",
    }
    assert body["results"][1]["rank"] == 0
    assert [name for name, _ in stages.orders] == ["decode", "talk"]


async def test_only_the_selected_stages_are_called(stages):
    body = await run(stages, [("talk", True, {})], chosen=["talk", "talk"])
    assert [result["stage"] for result in body["results"]] == ["talk"]


async def test_the_errors_of_the_stages_are_the_message(stages):
    answers = [("decode", False, {"error": "no"}), ("talk", False, {"error": "never"})]
    body = await run(stages, answers)
    assert (body["success"], body["message"]) == (False, "no; never")


async def test_a_failure_without_a_word_has_a_message_all_the_same(stages):
    body = await run(stages, [("decode", False, {}), ("talk", True, {})])
    assert body["message"] == "admin operation did not complete successfully"


@pytest.mark.parametrize(
    ("action", "success"), [("pause_generation", True), ("update_weights_from_disk", False)]
)
async def test_an_unknown_update_is_none(stages, action, success):
    body = await run(stages, [], action, chosen=["pre"])
    assert body["success"] is success


async def test_a_stage_that_is_late_ends_the_wait_and_is_named(stages, autojump_clock):
    outcome = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask():
            with pytest.raises(RequestFailed, match=r"no answer from talk in 3 s") as late:
                await asked(stages, timeout_s=3)
            outcome.append(late.value.status)

        await trio.testing.wait_all_tasks_blocked()
        stages.answer("decode")
    assert outcome == [504]


async def test_no_time_at_all_is_honoured(stages, autojump_clock):
    with pytest.raises(RequestFailed, match="in 0 s"):
        await asked(stages, timeout_s=0)


async def test_a_late_reply_is_not_taken_for_another(stages, autojump_clock):
    with pytest.raises(RequestFailed):
        await asked(stages, timeout_s=1)
    stages.answer("decode")
    old = stages.orders[-1][1]
    outcome = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask():
            outcome.append(await asked(stages, chosen=["decode"]))

        await trio.testing.wait_all_tasks_blocked()
        stages.operations.receive(AdminResult(old.op_id, "decode", old.action, False, "late"))
        await trio.testing.wait_all_tasks_blocked()
        assert outcome == []
        stages.answer("decode")
    assert outcome[0]["success"]


async def test_operations_take_turns(stages):
    done = []
    async with trio.open_nursery() as nursery:

        async def ask(action):
            await asked(stages, action, chosen=["decode"])
            done.append(action)

        nursery.start_soon(ask, "first")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, "second")
        await trio.testing.wait_all_tasks_blocked()
        assert [order.action for _, order in stages.orders] == ["first"]
        stages.answer("decode")
        await trio.testing.wait_all_tasks_blocked()
        assert done == ["first"]
        stages.answer("decode")
    assert done == ["first", "second"]


async def test_a_stage_that_ends_has_failed_the_operation(stages):
    outcome = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask():
            outcome.append(await asked(stages, chosen=["decode", "talk"]))

        await trio.testing.wait_all_tasks_blocked()
        stages.answer("talk")
        stages.operations.stage_ended("decode", "killed")
    assert (outcome[0]["success"], outcome[0]["message"]) == (False, "stage decode ended: killed")


async def test_a_stage_that_cannot_be_reached_has_failed_it_too(stages):
    def refuse(name, message):
        raise RuntimeError(f"{name} is far")

    body = await StageOperations(refuse).run(Admin("", "model_info"), ["decode"], READY)
    assert (body["success"], body["message"]) == (False, "decode is far")


def test_an_unknown_stage_is_refused_with_the_nearest_name(stages):
    with pytest.raises(RequestFailed, match="named decod; did you mean decode") as refused:
        stages.operations.select_stages(["decod"], PLAN)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "action",
    ["model_info", "pause_generation", "destroy_weights_update_group", "complete_weights_update"],
)
async def test_what_a_stage_may_do_beside_a_transfer_does_not_wait_its_turn(stages, action):
    outcomes = []

    async def ask(what):
        outcomes.append(await asked(stages, what, chosen=["decode"]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "update_weights_from_distributed")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, action)
        await trio.testing.wait_all_tasks_blocked()
        stages.answer("decode")
        await trio.testing.wait_all_tasks_blocked()
        assert [outcome["action"] for outcome in outcomes] == [action]
        first = stages.orders[0][1]
        stages.operations.receive(AdminResult(first.op_id, "decode", first.action, True, "ok"))
    assert outcomes[1]["action"] == "update_weights_from_distributed"
