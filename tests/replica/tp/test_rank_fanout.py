import pytest

from omni_proxy.replica.pipeline.stage_messages import Admin, AdminResult, StageStats
from omni_proxy.replica.text.operations import DAMAGED, PeerError, StepDone
from omni_proxy.replica.tp.group import ABORT_STEP, VERDICT, StepOverdue, Vote
from omni_proxy.replica.tp.rank_fanout import COLLECT_SECS, NOT_COLLECTED, RankFanOut


def result(success=True, message="ok", rank=0, data=None):
    error = None if success else message
    return AdminResult("op", "decode", "act", success, message, data or {}, error, rank)


class Leader:
    """Rank 0, whose operation has `steps` slow steps and then ends with `own_result`."""

    def __init__(self, ranks=(1, 2), own_result=None, steps=0):
        self.sent, self.scheduled, self.advanced, self.results = [], [], [], []
        self.interrupted, self.damages = [], 0
        self.own_result, self.steps = own_result or result(), steps
        self.steps_halt = True
        self.fan_out = RankFanOut(self, ranks)

    def start(self, timeout_s=None):
        self.fan_out.run(Admin("op", "act", {"key": 1}, timeout_s), self._go_on)

    def _go_on(self):
        if self.steps:
            self.steps -= 1
        else:
            self.fan_out.own_result(self.own_result)

    def step_done(self, error=None):
        self.fan_out.own_step(StepDone("op", error=error))

    def vote(self, rank, number=1, fault=""):
        self.fan_out.receive(rank, Vote("op", number, fault))

    def finish(self, rank, *outcome):
        self.fan_out.receive(rank, result(*outcome, rank=rank))

    def expire(self):
        reminder, _ = self.scheduled[-1]
        self.fan_out.overdue(reminder)

    def verdicts(self):
        payloads = [message.payload for message in self.sent if message.action == VERDICT]
        return [(payload["number"], payload["fault"]) for payload in payloads]

    def aborted_steps(self):
        payloads = [message.payload for message in self.sent if message.action == ABORT_STEP]
        return [(payload["number"], payload["fault"]) for payload in payloads]

    def only_result(self):
        (stage_result,) = self.results
        return stage_result

    # The interface of FanOutLeader

    def send_all(self, message):
        self.sent.append(message)

    def schedule(self, message, after_secs):
        entry = (message, after_secs)
        self.scheduled.append(entry)
        return lambda: self.scheduled.remove(entry) if entry in self.scheduled else None

    def advance(self, done):
        self.advanced.append(done)
        if done.error is not None:
            self.steps, self.own_result = 0, result(False, str(done.error))
        self._go_on()

    def interrupt(self, op_id, reason):
        self.interrupted.append((op_id, reason))

    def halts(self, op_id):
        return self.steps_halt

    def damaged(self):
        self.damages += 1

    def send_result(self, message):
        self.results.append(message)


def test_a_follower_that_cannot_undo_its_swap_is_reported_as_damage_at_once():
    leader = Leader(steps=1)
    leader.start()
    leader.fan_out.receive(1, Vote("op", 1, "RuntimeError: no memory", damaged=True))
    assert leader.damages == 1  # reported while rank 0 is still in its step
    leader.vote(2)
    leader.step_done()
    message = "The weights are damaged: update them before you continue."
    leader.fan_out.receive(1, result(False, message, 1, {DAMAGED: True}))
    leader.finish(2, False, "undone")
    stage_result = leader.only_result()
    assert not stage_result.success
    assert stage_result.message == stage_result.error == f"rank 1: {message}"
    assert (stage_result.data[DAMAGED], stage_result.data["engine_paused"]) == (True, True)


def test_an_undo_that_fails_after_the_last_verdict_is_reported_as_damage():
    leader = Leader(own_result=result(False, "The swap failed and was undone"))
    leader.steps = 1
    leader.start()
    leader.vote(2, fault="full")
    leader.vote(1)
    leader.step_done()
    leader.finish(2, False, "undone")
    assert (leader.damages, leader.results) == (0, [])
    leader.fan_out.receive(1, result(False, "The weights are damaged", 1, {DAMAGED: True}))
    assert leader.damages == 1
    assert leader.only_result().message == "rank 1: The weights are damaged"


def test_an_operation_that_rank_0_refuses_is_sent_to_no_other_rank():
    leader = Leader(own_result=result(False, "no"))
    leader.start()
    stage_result = leader.only_result()
    assert leader.sent == []
    assert (stage_result.success, stage_result.message, stage_result.rank, stage_result.role) == (
        False,
        "no",
        0,
        "leader",
    )
    assert stage_result.data["tp_size"] == 3
    assert [each["rank"] for each in stage_result.data["rank_results"]] == [0]
    assert not leader.fan_out.halting


def test_the_answer_has_the_results_of_all_ranks():
    leader = Leader(own_result=result(data={"count": 7}))
    leader.start()
    assert [(each.action, each.payload) for each in leader.sent] == [("act", {"key": 1})]
    assert leader.fan_out.halting
    leader.finish(2)
    assert leader.results == []
    leader.finish(1)
    stage_result = leader.only_result()
    assert (stage_result.success, stage_result.rank, stage_result.role) == (True, 0, "leader")
    assert stage_result.data["count"] == 7
    assert [(each["rank"], each["role"]) for each in stage_result.data["rank_results"]] == [
        (0, "leader"), (1, "single"), (2, "single"),
    ]  # fmt: skip
    assert not leader.fan_out.halting
    assert leader.scheduled == []


def test_ranks_compute_during_a_step_that_does_not_halt():
    leader = Leader(steps=2)
    leader.steps_halt = False
    leader.start()
    assert not leader.fan_out.halting
    leader.vote(1)
    leader.vote(2)
    leader.steps_halt = True
    leader.step_done()
    assert leader.fan_out.halting
    leader.vote(1, 2)
    leader.vote(2, 2)
    leader.step_done()
    # Rank 0 has ended; another rank may still be in the step that halts.
    assert leader.fan_out.halting
    leader.finish(1)
    leader.finish(2)
    assert not leader.fan_out.halting


def test_a_step_that_failed_at_one_rank_is_aborted_at_the_others():
    leader = Leader(steps=2)
    leader.start()
    leader.vote(1)
    leader.vote(2)
    leader.step_done()
    assert (leader.aborted_steps(), leader.interrupted) == ([], [])
    leader.vote(2, 2, "no room")
    assert leader.aborted_steps() == [(2, "rank 2: no room")]
    assert leader.interrupted == [("op", "rank 2: no room")]
    leader.vote(1, 2, "given up")
    assert len(leader.aborted_steps()) == len(leader.interrupted) == 1
    leader.step_done(RuntimeError("given up"))
    (fault,) = [fault for number, fault in leader.verdicts() if number == 2]
    assert "rank 2: no room" in fault


def test_a_step_that_failed_at_rank_0_is_aborted_at_the_others():
    leader = Leader(steps=1)
    leader.start()
    leader.step_done(RuntimeError("no"))
    assert (leader.aborted_steps(), leader.interrupted) == ([(1, "rank 0: no")], [])


def test_a_failed_rank_fails_the_operation_and_is_named():
    leader = Leader()
    leader.start()
    leader.finish(1, False, "disk full")
    leader.finish(2)
    stage_result = leader.only_result()
    assert not stage_result.success
    assert stage_result.message == stage_result.error == "rank 1: disk full"
    assert [each["success"] for each in stage_result.data["rank_results"]] == [True, False, True]


def test_no_rank_continues_before_all_have_finished_the_step():
    leader = Leader(steps=2)
    leader.start()
    leader.vote(1)
    leader.step_done()
    assert (leader.verdicts(), leader.advanced) == ([], [])
    leader.vote(2)
    assert leader.verdicts() == [(1, "")]
    leader.vote(2, 2)
    leader.vote(1, 2)
    assert leader.verdicts() == [(1, "")]
    leader.step_done()
    assert leader.verdicts() == [(1, ""), (2, "")]
    assert [done.error for done in leader.advanced] == [None, None]
    leader.finish(1)
    leader.finish(2)
    assert leader.only_result().success


def test_a_step_that_failed_at_a_follower_fails_at_the_leader():
    leader = Leader(steps=2)
    leader.start()
    leader.step_done()
    leader.vote(1)
    leader.vote(2, fault="no room")
    assert leader.verdicts() == [(1, "rank 2: no room")]
    (done,) = leader.advanced
    assert isinstance(done.error, PeerError)
    leader.finish(1, False, "rank 2: no room")
    leader.finish(2, False, "no room")
    assert leader.only_result().message == "rank 2: no room"


def test_a_failed_step_of_the_leader_fails_everywhere_and_keeps_its_error():
    leader = Leader(steps=2)
    leader.start()
    leader.vote(1)
    leader.vote(2)
    leader.step_done(KeyError("gone"))
    assert leader.verdicts() == [(1, "rank 0: 'gone'")]
    assert isinstance(leader.advanced[0].error, KeyError)


def test_a_rank_that_refuses_fails_the_step_of_the_others():
    leader = Leader(steps=1)
    leader.start()
    leader.finish(1, False, "busy")
    leader.vote(2)
    leader.step_done()
    assert leader.verdicts() == [(1, "rank 1: busy")]
    leader.finish(2, False, "rank 1: busy")
    stage_result = leader.only_result()
    assert not stage_result.success
    assert not leader.fan_out.halting


def test_a_rank_with_more_steps_than_rank_0_gets_a_verdict():
    leader = Leader()
    leader.start()
    leader.vote(1)
    assert leader.verdicts() == [(1, "")]
    leader.finish(1)
    leader.finish(2)
    assert leader.only_result().success


@pytest.mark.parametrize(("timeout_s", "secs"), [(None, COLLECT_SECS), (5.0, 5.0), (0.0, 0.0)])
def test_a_rank_that_does_not_answer_in_time_fails_the_collection(timeout_s, secs):
    leader = Leader()
    leader.start(timeout_s)
    assert [after for _, after in leader.scheduled] == [secs]
    leader.finish(1)
    leader.expire()
    stage_result = leader.only_result()
    assert (stage_result.success, stage_result.message) == (False, NOT_COLLECTED)
    assert stage_result.error == f"{NOT_COLLECTED}: no reply from rank 2"
    assert [each["rank"] for each in stage_result.data["rank_results"]] == [0, 1]
    # No batch can be computed until rank 2 has finished, too.
    assert leader.fan_out.halting
    leader.finish(2)
    assert not leader.fan_out.halting
    assert len(leader.results) == 1


def test_a_rank_that_does_not_finish_a_step_in_time_fails_it():
    leader = Leader(steps=2)
    leader.start()
    leader.vote(1)
    leader.step_done()
    leader.expire()
    fault = f"{NOT_COLLECTED}: no reply from rank 2"
    assert leader.verdicts() == [(1, fault)]
    assert isinstance(leader.advanced[0].error, PeerError)
    assert not leader.only_result().success
    leader.vote(2)
    assert leader.verdicts() == [(1, fault)]
    leader.finish(1, False, fault)
    leader.finish(2, False, fault)
    assert not leader.fan_out.halting


def test_a_reminder_of_an_earlier_step_is_ignored():
    leader = Leader(steps=1)
    leader.start()
    leader.step_done()
    leader.vote(1)
    leader.vote(2)
    leader.fan_out.overdue(StepOverdue("op", 1))
    leader.fan_out.overdue(StepOverdue("other", 1))
    assert leader.results == []


def test_invalid_and_unexpected_replies_are_ignored():
    leader = Leader()
    leader.fan_out.receive(1, StageStats("decode", {}))
    leader.finish(1)
    leader.fan_out.own_result(result())
    assert leader.only_result() == result()
