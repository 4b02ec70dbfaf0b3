import pytest
import trio
import trio.testing

from omni_proxy.replica.pipeline.config import compile_plan
from omni_proxy.replica.pipeline.coordination.stage_operations import StageOperations
from omni_proxy.replica.pipeline.requests import RequestFailed
from omni_proxy.replica.pipeline.stage_messages import Admin, AdminResult
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
    """Stages that answer an operation when the test calls `answer`."""

    def __init__(self):
        self.orders = []
        self.operations = StageOperations(lambda name, message: self.orders.append((name, message)))

    def answer(self, name, success=True, **keys):
        order = self.orders[-1][1]
        keys = {"message": "done", "data": {"of": name}, **keys}
        self.operations.receive(AdminResult(order.op_id, name, order.action, success, **keys))


@pytest.fixture
def stages():
    return Stages()


async def run_operation(stages, action="model_info", payload=None, chosen=None, timeout_s=None):
    names = stages.operations.select_stages(chosen, PLAN)
    return await stages.operations.run(Admin("", action, payload or {}, timeout_s), names, READY)


async def run_with_answers(stages, answers, *arguments, **keys):
    bodies = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask():
            bodies.append(await run_operation(stages, *arguments, **keys))

        await trio.testing.wait_all_tasks_blocked()
        for name, success, fields in answers:
            stages.answer(name, success, **fields)
    return bodies[0]


async def test_results_are_in_arrival_order_after_unsupported_stages(stages):
    body = await run_with_answers(stages, [("talk", True, {"rank": 0}), ("decode", True, {})])
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
    body = await run_with_answers(stages, [("talk", True, {})], chosen=["talk", "talk"])
    assert [result["stage"] for result in body["results"]] == ["talk"]


async def test_the_message_has_the_errors_of_the_stages(stages):
    answers = [("decode", False, {"error": "no"}), ("talk", False, {"error": "never"})]
    body = await run_with_answers(stages, answers)
    assert (body["success"], body["message"]) == (False, "no; never")


async def test_a_failure_without_an_error_has_a_default_message(stages):
    body = await run_with_answers(stages, [("decode", False, {}), ("talk", True, {})])
    assert body["message"] == "admin operation did not complete successfully"


@pytest.mark.parametrize(
    ("action", "success"), [("pause_generation", True), ("update_weights_from_disk", False)]
)
async def test_a_weight_update_that_no_stage_supports_fails(stages, action, success):
    body = await run_with_answers(stages, [], action, chosen=["pre"])
    assert body["success"] is success


async def test_a_stage_that_does_not_answer_in_time_is_named(stages, autojump_clock):
    statuses = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask():
            with pytest.raises(RequestFailed, match=r"no reply from talk in 3 s") as caught:
                await run_operation(stages, timeout_s=3)
            statuses.append(caught.value.status)

        await trio.testing.wait_all_tasks_blocked()
        stages.answer("decode")
    assert statuses == [504]


async def test_a_timeout_of_0_is_honoured(stages, autojump_clock):
    with pytest.raises(RequestFailed, match="in 0 s"):
        await run_operation(stages, timeout_s=0)


async def test_a_late_reply_is_not_used_for_the_next_operation(stages, autojump_clock):
    with pytest.raises(RequestFailed):
        await run_operation(stages, timeout_s=1)
    stages.answer("decode")
    late = stages.orders[-1][1]
    bodies = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask():
            bodies.append(await run_operation(stages, chosen=["decode"]))

        await trio.testing.wait_all_tasks_blocked()
        stages.operations.receive(AdminResult(late.op_id, "decode", late.action, False, "late"))
        await trio.testing.wait_all_tasks_blocked()
        assert bodies == []
        stages.answer("decode")
    assert bodies[0]["success"]


async def test_operations_run_one_after_another(stages):
    done = []
    async with trio.open_nursery() as nursery:

        async def ask(action):
            await run_operation(stages, action, chosen=["decode"])
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


async def test_a_stage_that_ends_fails_the_operation(stages):
    bodies = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask():
            bodies.append(await run_operation(stages, chosen=["decode", "talk"]))

        await trio.testing.wait_all_tasks_blocked()
        stages.answer("talk")
        stages.operations.stage_ended("decode", "killed")
    assert (bodies[0]["success"], bodies[0]["message"]) == (False, "stage decode ended: killed")


async def test_a_stage_that_cannot_be_reached_fails_the_operation(stages):
    def refuse(name, message):
        raise RuntimeError(f"{name} is unreachable")

    body = await StageOperations(refuse).run(Admin("", "model_info"), ["decode"], READY)
    assert (body["success"], body["message"]) == (False, "decode is unreachable")


def test_an_unknown_stage_is_refused_with_the_nearest_name(stages):
    with pytest.raises(RequestFailed, match="named decod; did you mean decode") as caught:
        stages.operations.select_stages(["decod"], PLAN)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "action",
    ["model_info", "pause_generation", "destroy_weights_update_group", "complete_weights_update"],
)
async def test_operations_allowed_during_a_transfer_do_not_wait_for_it(stages, action):
    bodies = []

    async def ask(name):
        bodies.append(await run_operation(stages, name, chosen=["decode"]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "update_weights_from_distributed")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, action)
        await trio.testing.wait_all_tasks_blocked()
        stages.answer("decode")
        await trio.testing.wait_all_tasks_blocked()
        assert [body["action"] for body in bodies] == [action]
        first = stages.orders[0][1]
        stages.operations.receive(AdminResult(first.op_id, "decode", first.action, True, "ok"))
    assert bodies[1]["action"] == "update_weights_from_distributed"
