import trio

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.protocol.replies import NOT_AWAITED
from omni_proxy.weight_sync.session.fan_out import FanOut, Patience


class Member:
    """Answers after a while: `secs` until then, `status` of what it says."""

    ranks = 1

    def __init__(self, name, secs, status=200):
        self.name, self.secs, self.status = name, secs, status
        self.undone = trio.Event()

    async def answer(self):
        with trio.move_on_after(self.secs):
            await self.undone.wait()
            return WorkerResult(self.name, 400, {"success": False, "message": "undone"})
        return WorkerResult(self.name, self.status, {"success": self.status == 200})


async def undo(member):
    member.undone.set()
    return WorkerResult(member.name, 200)


def fan(*members):
    return FanOut(members, lambda member: member.answer())


async def test_all_are_asked_at_once_and_answer_in_their_order(autojump_clock):
    one = fan(Member("a", 3), Member("b", 1))
    answers = await one.run(Patience(9))
    assert [answer.worker for answer in answers] == ["a", "b"]
    assert (one.cause, trio.current_time()) == ("", 3)


async def test_the_first_failure_ends_it(autojump_clock):
    one = fan(Member("a", 300), Member("b", 2, 400))
    answers = await one.run(Patience(900))
    assert trio.current_time() == 2
    assert one.cause == "b: status 400"
    assert [answer.error for answer in answers] == [NOT_AWAITED, ""]


async def test_others_get_their_grace_and_no_more(autojump_clock):
    one = fan(Member("a", 3), Member("b", 1, 500), Member("c", 300))
    answers = await one.run(Patience(900, grace_secs=5))
    assert trio.current_time() == 6
    assert [answer.success for answer in answers] == [True, False, False]


async def test_who_is_late_is_undone_and_may_still_say_what_it_did(autojump_clock):
    late = Member("c", 300)
    one = fan(Member("b", 1, 500), late)
    answers = await one.run(Patience(900, grace_secs=5, undo=undo))
    assert trio.current_time() == 6
    assert [answer.status for answer in answers] == [500, 400]


async def test_a_deadline_names_who_is_missing(autojump_clock):
    one = fan(Member("a", 1), Member("b", 30), Member("c", 40))
    await one.run(Patience(10))
    assert one.cause == "no answer within 10 s: b, c"
    assert trio.current_time() == 10


async def test_somebody_outside_may_know_better(autojump_clock, nursery):
    one = fan(Member("a", 30))

    async def know():
        await trio.sleep(2)
        one.fail("the trainer is gone")
        one.fail("another reason")

    nursery.start_soon(know)
    await one.run(Patience(10))
    assert (one.cause, trio.current_time()) == ("the trainer is gone", 2)


async def test_where_nobody_can_do_well_any_more_the_others_get_less_time(autojump_clock, nursery):
    late = Member("a", 300)
    one = fan(late)

    async def know():
        await trio.sleep(2)
        one.fail("the trainer is gone", hurry=True)

    nursery.start_soon(know)
    await one.run(Patience(900, grace_secs=5, undo=undo))
    assert trio.current_time() == 3
    assert late.undone.is_set()
