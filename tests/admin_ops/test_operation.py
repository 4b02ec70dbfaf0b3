from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.admin_ops.operation import Operation, Step, WorkerOutcome, worker_outcomes
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.admin_ops.routes import BY_PATH, INIT, ROUTES, Kind

APPLY = ("/end_weight_update", "/complete_weights_update", "/finish_weight_update")
KINDS = st.sampled_from(("well", "denied", "4xx", "5xx", "lost"))
ANSWER_OF = {
    "well": (200, {"success": True}, ""),
    "denied": (200, {"success": False}, ""),
    "4xx": (400, {"message": "no"}, ""),
    "5xx": (500, "oops", ""),
    "lost": (None, "", "ReadError"),
}


def answers_of(kinds):
    return [
        WorkerResult(f"http://{at}", *ANSWER_OF[kind][:2], error=ANSWER_OF[kind][2])
        for at, kind in enumerate(kinds)
    ]


def naive(route, kinds):
    """The table of the room, read once more from its words."""
    found = []
    for kind in kinds:
        if kind == "well":
            found.append(WorkerOutcome.RESTORED)
        elif route.path == INIT:
            found.append(WorkerOutcome.DISABLED)
        elif route.path.startswith("/update_weights") or route.path in APPLY:
            nothing = route.path == "/update_weights_from_disk" and set(kinds) == {"4xx"}
            found.append(WorkerOutcome.RESTORED if nothing else WorkerOutcome.UNCERTAIN)
        else:
            found.append(WorkerOutcome.RESTORED)
    return found


@given(st.sampled_from(ROUTES), st.lists(KINDS, min_size=1, max_size=4))
def test_what_is_left_of_each_worker(route, kinds):
    left = worker_outcomes(route, answers_of(kinds))
    assert [what.outcome for what in left.values()] == naive(route, kinds)
    assert all(
        bool(what.reason) == (what.outcome is not WorkerOutcome.RESTORED) for what in left.values()
    )


def test_discarding_weights_leaves_all_uncertain_but_4xx_refusals():
    route = replace(BY_PATH["/sleep"], discards=True)
    left = worker_outcomes(route, answers_of(["well", "4xx", "5xx", "lost"]))
    assert [what.outcome.value for what in left.values()] == [
        "uncertain", "restored", "uncertain", "uncertain"
    ]  # fmt: skip


def test_the_reason_names_the_route_and_the_workers_error():
    left = worker_outcomes(BY_PATH["/update_weights_from_distributed"], answers_of(["4xx", "lost"]))
    assert [what.reason for what in left.values()] == [
        "update_weights_from_distributed failed: status 400: no",
        "update_weights_from_distributed failed: ReadError",
    ]


def test_only_what_changes_workers_takes_a_turn_and_holds_them():
    for route in ROUTES:
        changes = route.kind in (Kind.PAUSE, Kind.GROUP, Kind.UPDATE)
        assert route.needs_lock is changes
        assert bool(route.hold) is changes
    assert BY_PATH["/pause_generation"].hold == "paused"
    assert not BY_PATH[INIT].drains


class Steps(RuleBasedStateMachine):
    """Against a list of the steps taken: strictly forward, and the words follow."""

    def __init__(self):
        super().__init__()
        self.operation = Operation("1", BY_PATH["/pause_generation"], "me", 10.0)
        self.operation.target({"http://0": frozenset(("launch",)), "http://1": frozenset()})
        self.taken = [Step.WAITING]
        self.heard = {}

    @rule(step=st.sampled_from(Step), at=st.floats(11, 20))
    def enter(self, step, at):
        if list(Step).index(step) > list(Step).index(self.taken[-1]):
            self.operation.enter(step, at)
            self.taken.append(step)
            assert self.operation.since == at
        else:
            with pytest.raises(ValueError, match="is not followed by"):
                self.operation.enter(step, at)

    @precondition(lambda self: len(self.heard) < 2)
    @rule(kind=KINDS)
    def receive(self, kind):
        url = f"http://{len(self.heard)}"
        status, body, error = ANSWER_OF[kind]
        self.operation.on_result(WorkerResult(url, status, body, error))
        self.heard[url] = kind

    @invariant()
    def progress_is_a_row_for_each_target(self):
        rows = self.operation.progress()
        assert [row["worker"] for row in rows] == ["http://0", "http://1"]
        late = list(Step).index(self.taken[-1]) >= list(Step).index(Step.CALLING)
        for row in rows:
            kind = self.heard.get(row["worker"])
            expected = ("asked" if late else "waiting") if kind is None else (
                "done" if kind == "well" else "failed"
            )  # fmt: skip
            assert row["progress"] == expected

    @invariant()
    def its_words_name_it(self):
        words = self.operation.describe(12.5)
        assert words.startswith("pause_generation of me began 2.5 s ago, step ")
        asked = f"{len(self.heard)} of 2 workers" in words
        assert asked is (self.taken[-1] is Step.CALLING)
        assert self.operation.status(12.5)["age_secs"] == 2.5


TestSteps = Steps.TestCase


def test_the_holds_of_before_are_kept():
    operation = Operation("1", BY_PATH[INIT], "", 0.0)
    operation.target({"http://a": frozenset(("paused",))})
    assert (operation.targets, operation.was["http://a"]) == (("http://a",), {"paused"})
    assert operation.describe(1.0).startswith("init_weights_update_group began 1.0 s ago")
