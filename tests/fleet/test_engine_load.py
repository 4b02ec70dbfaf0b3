import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.engine_load import LoadBounds
from omni_proxy.wire.load_report import EngineLoad, LoadReport
from tests.fleet.entries import NOW, entry, fleet_of

MAX_AGE = 5.0


class Loads:
    """A fleet whose clock is `now`."""

    def __init__(self, *names, bounds=LoadBounds(8, 0.8, MAX_AGE), **fields):  # noqa: B008
        self.now = 100.0
        self.fleet = fleet_of(*(entry(name, **fields) for name in names))
        self.loads = self.fleet.loads
        self.loads.now = lambda: self.now
        self.loads.configure(bounds, [])
        self.workers = self.fleet.workers

    def report(self, target, waiting=0.0, usage=0.0, at=None):
        load = EngineLoad(LoadReport(waiting, usage), self.now if at is None else at)
        self.loads.report(target, load)

    def below(self, candidates=None):
        chosen = self.loads.below_bounds(candidates or self.workers)
        return [target.display_id for target in chosen]


@pytest.mark.parametrize(
    ("waiting", "usage", "overloaded"),
    [(8.0, None, True), (7.0, 0.79, False), (None, 0.8, True), (None, None, False)],
)
def test_a_figure_at_a_bound_or_above_is_overload(waiting, usage, overloaded):
    it = Loads("a", "b")
    it.report(it.workers[0], waiting, usage)
    assert it.loads.is_overloaded(it.workers[0]) is overloaded
    assert it.below() == (["b:1"] if overloaded else ["a:1", "b:1"])


def test_without_a_bound_nothing_is_overloaded():
    it = Loads("a", "b", bounds=LoadBounds())
    it.report(it.workers[0], 10**9, 1.0)
    assert not it.loads.overloaded
    assert it.below() == ["a:1", "b:1"]


def test_where_all_are_overloaded_there_is_no_veto():
    it = Loads("a", "b")
    for worker in it.workers:
        it.report(worker, 9.0)
    assert it.below() == ["a:1", "b:1"]
    assert list(it.loads.reasons(it.workers)) == []


def test_a_report_that_is_too_old_counts_for_nothing_and_is_stale():
    it = Loads("a", "b")
    a = it.workers[0]
    it.report(a, 9.0)
    it.now += MAX_AGE
    assert (it.below(), it.loads.is_stale(a.engine_load)) == (["b:1"], False)
    it.now += 0.1
    assert (it.below(), it.loads.is_stale(a.engine_load)) == (["a:1", "b:1"], True)
    assert not it.loads.overloaded


def test_an_older_report_changes_nothing():
    it = Loads("a", "b")
    a = it.workers[0]
    it.report(a, 9.0)
    it.report(a, 0.0, at=it.now - 1)
    assert a.engine_load.report.waiting == 9.0
    it.report(a, 0.0)
    assert it.below() == ["a:1", "b:1"]


def test_changed_bounds_judge_the_last_reports():
    it = Loads("a", "b")
    it.report(it.workers[0], 4.0)
    it.loads.configure(LoadBounds(4, 0.0, MAX_AGE), it.fleet.targets())
    assert it.below() == ["b:1"]
    it.loads.configure(LoadBounds(5, 0.0, MAX_AGE), it.fleet.targets())
    assert it.below() == ["a:1", "b:1"]


def test_each_rank_is_judged_by_its_own_load():
    it = Loads("a", ranks=2)
    (a,) = it.workers
    it.loads.report_engines(a, {0: LoadReport(9.0, 0.5), 1: LoadReport(1.0, 0.5)}, it.now)
    assert it.below(a.dp_ranks) == ["a:1@1"]
    assert not it.loads.is_overloaded(a)
    assert a.engine_load.report == LoadReport(10.0, 0.5)
    it.loads.report_engines(a, {0: LoadReport(9.0, 0.5), 1: LoadReport(8.0, 0.5)}, it.now)
    assert it.loads.is_overloaded(a)


def test_ranks_without_a_load_of_their_own_are_judged_by_that_of_their_worker():
    it = Loads("a", "b", ranks=2)
    a, b = it.workers
    it.report(a, 9.0)
    assert it.below([*a.dp_ranks, *b.dp_ranks]) == ["b:1@0", "b:1@1"]


def test_the_reason_has_the_figure_and_the_bound():
    it = Loads("a", "b")
    a, b = it.workers
    it.report(a, 9.0)
    it.report(b, 0.0, 0.9)
    it.loads.configure(LoadBounds(8, 0.0, MAX_AGE), it.fleet.targets())
    ((target, reason),) = it.loads.reasons(it.workers)
    assert target is a
    assert reason == "overloaded: 9 requests wait in its engine (limit: 8)"


def test_watchers_get_reports_of_engines_but_not_those_of_other_processes():
    it = Loads("a")
    (a,) = it.workers
    seen = []
    it.loads.watch(seen.append)
    assert it.loads.take(a, EngineLoad(LoadReport(1.0, 0.0), it.now))
    assert seen == []
    it.report(a, 2.0)
    assert seen == [a]


def test_a_worker_that_left_is_forgotten():
    it = Loads("a", "b")
    it.report(it.workers[0], 9.0)
    it.fleet.apply([entry("b")], NOW)
    it.now += MAX_AGE + 1
    it.below(it.fleet.workers)
    assert not it.loads.overloaded


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.floats(0, 12), st.floats(0, 1), st.floats(0, 3), st.integers(0, 12)
    ),
    max_size=12,
)


@given(STEPS)
def test_the_veto_is_that_of_a_model_that_looks_at_every_report(steps):
    it = Loads("a", "b", "c")
    last, bound = {}, 8
    for index, waiting, usage, pause, new_bound in steps:
        worker = it.workers[index]
        it.report(worker, waiting, usage)
        last[worker] = (waiting, usage, it.now)
        if new_bound != bound:
            bound = new_bound
            it.loads.configure(LoadBounds(bound, 0.8, MAX_AGE), it.fleet.targets())
        it.now += pause
        above = {
            worker
            for worker, (waiting, usage, at) in last.items()
            if it.now <= at + MAX_AGE and ((bound and waiting >= bound) or usage >= 0.8)
        }
        kept = [worker for worker in it.workers if worker not in above] or it.workers
        assert list(it.loads.below_bounds(it.workers)) == kept
