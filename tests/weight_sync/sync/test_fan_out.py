import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.protocol.participant_reports import NOT_AWAITED
from omni_proxy.weight_sync.sync.participant import FanOutTimeouts, GroupFanOut


class Participant:
    """Responds with `status` after `secs`."""

    rank_count = 1

    def __init__(self, name, secs, status=200):
        self.name, self.secs, self.status = name, secs, status
        self.undone = trio.Event()

    async def response(self):
        with trio.move_on_after(self.secs):
            await self.undone.wait()
            return WorkerResult(self.name, 400, {"success": False, "message": "undone"})
        return WorkerResult(self.name, self.status, {"success": self.status == 200})


async def undo(participant):
    participant.undone.set()
    return WorkerResult(participant.name, 200)


def fan_out_to(*participants):
    return GroupFanOut(participants, lambda participant: participant.response())


async def test_participants_are_called_concurrently_and_results_are_in_their_order(autojump_clock):
    fan_out = fan_out_to(Participant("a", 3), Participant("b", 1))
    responses = await fan_out.run(FanOutTimeouts(9))
    assert [response.worker for response in responses] == ["a", "b"]
    assert (fan_out.cause, trio.current_time()) == ("", 3)


async def test_the_first_failure_ends_the_fan_out(autojump_clock):
    fan_out = fan_out_to(Participant("a", 300), Participant("b", 2, 400))
    responses = await fan_out.run(FanOutTimeouts(900))
    assert trio.current_time() == 2
    assert fan_out.cause == "b: status 400"
    assert [response.error for response in responses] == [NOT_AWAITED, ""]


async def test_after_a_failure_the_others_get_the_grace_time(autojump_clock):
    fan_out = fan_out_to(Participant("a", 3), Participant("b", 1, 500), Participant("c", 300))
    responses = await fan_out.run(FanOutTimeouts(900, grace_secs=5))
    assert trio.current_time() == 6
    assert [response.success for response in responses] == [True, False, False]


async def test_a_late_participant_is_undone_and_its_late_result_counts(autojump_clock):
    late = Participant("c", 300)
    fan_out = fan_out_to(Participant("b", 1, 500), late)
    responses = await fan_out.run(FanOutTimeouts(900, grace_secs=5, undo=undo))
    assert trio.current_time() == 6
    assert [response.status for response in responses] == [500, 400]


async def test_a_timeout_names_the_missing_participants(autojump_clock):
    fan_out = fan_out_to(Participant("a", 1), Participant("b", 30), Participant("c", 40))
    await fan_out.run(FanOutTimeouts(10))
    assert fan_out.cause == "no answer within 10 s: b, c"
    assert trio.current_time() == 10


async def test_a_fan_out_can_be_failed_from_outside(autojump_clock, nursery):
    fan_out = fan_out_to(Participant("a", 30))

    async def fail_later():
        await trio.sleep(2)
        fan_out.fail("the trainer is gone")
        fan_out.fail("another reason")

    nursery.start_soon(fail_later)
    await fan_out.run(FanOutTimeouts(10))
    assert (fan_out.cause, trio.current_time()) == ("the trainer is gone", 2)


async def test_a_failure_of_all_participants_shortens_the_grace_time(autojump_clock, nursery):
    late = Participant("a", 300)
    fan_out = fan_out_to(late)

    async def fail_later():
        await trio.sleep(2)
        fan_out.fail("the trainer is gone", all_fail=True)

    nursery.start_soon(fail_later)
    await fan_out.run(FanOutTimeouts(900, grace_secs=5, undo=undo))
    assert trio.current_time() == 3
    assert late.undone.is_set()
