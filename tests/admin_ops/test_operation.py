from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.admin_ops.admin_route_table import BY_PATH, ROUTES, Kind
from omni_proxy.admin_ops.engine_dialects import INIT
from omni_proxy.admin_ops.operation import Operation, Step, WorkerOutcome, worker_dispositions
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.operations.operation_queue import operation_record, worker_rows

APPLY = ("/end_weight_update", "/complete_weights_update", "/finish_weight_update")
KINDS = st.sampled_from(("ok", "denied", "4xx", "5xx", "lost"))
RESULT_OF = {
    "ok": (200, {"success": True}, ""),
    "denied": (200, {"success": False}, ""),
    "4xx": (400, {"message": "no"}, ""),
    "5xx": (500, "oops", ""),
    "lost": (None, "", "ReadError"),
}


def results_of(kinds):
    return [
        WorkerResult(f"http://{at}", *RESULT_OF[kind][:2], error=RESULT_OF[kind][2])
        for at, kind in enumerate(kinds)
    ]


def expected_outcomes(route, kinds):
    """The expected outcomes, written a second time from the documentation."""
    outcomes = []
    for kind in kinds:
        if kind == "ok":
            outcomes.append(WorkerOutcome.RESTORED)
        elif route.path == INIT:
            outcomes.append(WorkerOutcome.DISABLED)
        elif route.path.startswith("/update_weights") or route.path in APPLY:
            unchanged = route.path == "/update_weights_from_disk" and set(kinds) == {"4xx"}
            outcomes.append(WorkerOutcome.RESTORED if unchanged else WorkerOutcome.UNCERTAIN)
        else:
            outcomes.append(WorkerOutcome.RESTORED)
    return outcomes


@given(st.sampled_from(ROUTES), st.lists(KINDS, min_size=1, max_size=4))
def test_the_outcome_of_each_worker_follows_from_its_result(route, kinds):
    dispositions = worker_dispositions(route, results_of(kinds))
    assert [each.outcome for each in dispositions.values()] == expected_outcomes(route, kinds)
    assert all(
        bool(worker.reason) == (worker.outcome is not WorkerOutcome.RESTORED)
        for worker in dispositions.values()
    )


def test_discarding_weights_makes_all_workers_uncertain_except_after_a_4xx():
    route = replace(BY_PATH["/sleep"], discards=True)
    dispositions = worker_dispositions(route, results_of(["ok", "4xx", "5xx", "lost"]))
    assert [worker.outcome.value for worker in dispositions.values()] == [
        "uncertain", "restored", "uncertain", "uncertain"
    ]  # fmt: skip


def test_the_reason_names_the_route_and_the_workers_error():
    dispositions = worker_dispositions(
        BY_PATH["/update_weights_from_distributed"], results_of(["4xx", "lost"])
    )
    assert [worker.reason for worker in dispositions.values()] == [
        "update_weights_from_distributed failed: status 400: no",
        "update_weights_from_distributed failed: ReadError",
    ]


def test_only_routes_that_change_workers_take_the_lock_and_hold_workers():
    for route in ROUTES:
        changes = route.kind in (Kind.PAUSE, Kind.GROUP, Kind.UPDATE)
        assert route.needs_lock is changes
        assert bool(route.hold) is changes
    assert BY_PATH["/pause_generation"].hold == "paused"
    assert not BY_PATH[INIT].drains


class Steps(RuleBasedStateMachine):
    """Compares an operation with the list of steps that it entered: steps only advance."""

    def __init__(self):
        super().__init__()
        self.operation = Operation("1", BY_PATH["/pause_generation"], "me", 10.0)
        self.operation.target({"http://0": frozenset(("launch",)), "http://1": frozenset()})
        self.steps = [Step.WAITING]
        self.received = {}

    @rule(step=st.sampled_from(Step), at=st.floats(11, 20))
    def enter(self, step, at):
        if list(Step).index(step) > list(Step).index(self.steps[-1]):
            self.operation.enter(step, at)
            self.steps.append(step)
            assert self.operation.since == at
        else:
            with pytest.raises(ValueError, match="is not followed by"):
                self.operation.enter(step, at)

    @precondition(lambda self: len(self.received) < 2)
    @rule(kind=KINDS)
    def receive(self, kind):
        url = f"http://{len(self.received)}"
        status, body, error = RESULT_OF[kind]
        self.operation.on_result(WorkerResult(url, status, body, error))
        self.received[url] = kind

    @invariant()
    def the_record_has_a_row_for_each_target(self):
        rows = worker_rows(self.operation)
        assert [row["worker"] for row in rows] == ["http://0", "http://1"]
        late = list(Step).index(self.steps[-1]) >= list(Step).index(Step.CALLING)
        for row in rows:
            kind = self.received.get(row["worker"])
            expected = ("asked" if late else "waiting") if kind is None else (
                "done" if kind == "ok" else "failed"
            )  # fmt: skip
            assert row["progress"] == expected
        unfinished = [row["worker"] for row in rows if row["progress"] != "done"]
        assert self.operation.failed_targets == unfinished

    @invariant()
    def the_description_names_the_route_the_age_and_the_step(self):
        description = self.operation.describe(12.5)
        assert description.startswith("pause_generation of me began 2.5 s ago, step ")
        counts_workers = f"{len(self.received)} of 2 workers" in description
        assert counts_workers is (self.steps[-1] is Step.CALLING)
        assert operation_record(self.operation, 12.5)["age_secs"] == 2.5


TestSteps = Steps.TestCase


def test_the_holds_from_before_the_operation_are_kept():
    operation = Operation("1", BY_PATH[INIT], "", 0.0)
    operation.target({"http://a": frozenset(("paused",))})
    assert (operation.targets, operation.was["http://a"]) == (("http://a",), {"paused"})
    assert operation.describe(1.0).startswith("init_weights_update_group began 1.0 s ago")
