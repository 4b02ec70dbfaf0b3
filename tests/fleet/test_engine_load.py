import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.fleet.engine_load import LoadBounds
from omni_proxy.wire.load_report import EngineLoad, LoadReport
from tests.fleet.entries import NOW, entry, fleet_of

MAX_AGE = 5.0


class LoadedFleet:
    """A fleet with load limits; `now` is its clock."""

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
        targets = self.loads.below_bounds(candidates or self.workers)
        return [target.display_id for target in targets]


@pytest.mark.parametrize(
    ("waiting", "usage", "overloaded"),
    [(8.0, None, True), (7.0, 0.79, False), (None, 0.8, True), (None, None, False)],
)
def test_a_load_at_or_above_a_limit_is_an_overload(waiting, usage, overloaded):
    setup = LoadedFleet("a", "b")
    setup.report(setup.workers[0], waiting, usage)
    assert setup.loads.is_overloaded(setup.workers[0]) is overloaded
    assert setup.below() == (["b:1"] if overloaded else ["a:1", "b:1"])


def test_without_limits_no_worker_is_overloaded():
    setup = LoadedFleet("a", "b", bounds=LoadBounds())
    setup.report(setup.workers[0], 10**9, 1.0)
    assert not setup.loads.overloaded
    assert setup.below() == ["a:1", "b:1"]


def test_if_all_workers_are_overloaded_all_are_kept():
    setup = LoadedFleet("a", "b")
    for worker in setup.workers:
        setup.report(worker, 9.0)
    assert setup.below() == ["a:1", "b:1"]
    assert list(setup.loads.reasons(setup.workers)) == []


def test_a_report_that_is_too_old_is_stale_and_ignored():
    setup = LoadedFleet("a", "b")
    a = setup.workers[0]
    setup.report(a, 9.0)
    setup.now += MAX_AGE
    assert (setup.below(), setup.loads.is_stale(a.engine_load)) == (["b:1"], False)
    setup.now += 0.1
    assert (setup.below(), setup.loads.is_stale(a.engine_load)) == (["a:1", "b:1"], True)
    assert not setup.loads.overloaded


def test_an_older_report_is_ignored():
    setup = LoadedFleet("a", "b")
    a = setup.workers[0]
    setup.report(a, 9.0)
    setup.report(a, 0.0, at=setup.now - 1)
    assert a.engine_load.report.waiting == 9.0
    setup.report(a, 0.0)
    assert setup.below() == ["a:1", "b:1"]


def test_changed_limits_apply_to_the_last_reports():
    setup = LoadedFleet("a", "b")
    setup.report(setup.workers[0], 4.0)
    setup.loads.configure(LoadBounds(4, 0.0, MAX_AGE), setup.fleet.targets())
    assert setup.below() == ["b:1"]
    setup.loads.configure(LoadBounds(5, 0.0, MAX_AGE), setup.fleet.targets())
    assert setup.below() == ["a:1", "b:1"]


def test_each_rank_is_overloaded_by_its_own_load():
    setup = LoadedFleet("a", ranks=2)
    (a,) = setup.workers
    setup.loads.report_engines(a, {0: LoadReport(9.0, 0.5), 1: LoadReport(1.0, 0.5)}, setup.now)
    assert setup.below(a.dp_ranks) == ["a:1@1"]
    assert not setup.loads.is_overloaded(a)
    assert a.engine_load.report == LoadReport(10.0, 0.5)
    setup.loads.report_engines(a, {0: LoadReport(9.0, 0.5), 1: LoadReport(8.0, 0.5)}, setup.now)
    assert setup.loads.is_overloaded(a)


def test_ranks_without_their_own_load_use_that_of_their_worker():
    setup = LoadedFleet("a", "b", ranks=2)
    a, b = setup.workers
    setup.report(a, 9.0)
    assert setup.below([*a.dp_ranks, *b.dp_ranks]) == ["b:1@0", "b:1@1"]


def test_the_reason_has_the_load_and_the_limit():
    setup = LoadedFleet("a", "b")
    a, b = setup.workers
    setup.report(a, 9.0)
    setup.report(b, 0.0, 0.9)
    setup.loads.configure(LoadBounds(8, 0.0, MAX_AGE), setup.fleet.targets())
    ((target, reason),) = setup.loads.reasons(setup.workers)
    assert target is a
    assert reason == "overloaded: 9 requests wait in its engine (limit: 8)"


def test_watchers_are_called_for_reports_of_engines_only():
    setup = LoadedFleet("a")
    (a,) = setup.workers
    seen = []
    setup.loads.watch(seen.append)
    assert setup.loads.take(a, EngineLoad(LoadReport(1.0, 0.0), setup.now))
    assert seen == []
    setup.report(a, 2.0)
    assert seen == [a]


def test_a_removed_worker_is_forgotten():
    setup = LoadedFleet("a", "b")
    setup.report(setup.workers[0], 9.0)
    setup.fleet.apply([entry("b")], NOW)
    setup.now += MAX_AGE + 1
    setup.below(setup.fleet.workers)
    assert not setup.loads.overloaded


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.floats(0, 12), st.floats(0, 1), st.floats(0, 3), st.integers(0, 12)
    ),
    max_size=12,
)


@given(STEPS)
def test_the_kept_workers_are_those_of_a_naive_model(steps):
    setup = LoadedFleet("a", "b", "c")
    last, bound = {}, 8
    for index, waiting, usage, pause, new_bound in steps:
        worker = setup.workers[index]
        setup.report(worker, waiting, usage)
        last[worker] = (waiting, usage, setup.now)
        if new_bound != bound:
            bound = new_bound
            setup.loads.configure(LoadBounds(bound, 0.8, MAX_AGE), setup.fleet.targets())
        setup.now += pause
        above = {
            worker
            for worker, (waiting, usage, at) in last.items()
            if setup.now <= at + MAX_AGE and ((bound and waiting >= bound) or usage >= 0.8)
        }
        kept = [worker for worker in setup.workers if worker not in above] or setup.workers
        assert list(setup.loads.below_bounds(setup.workers)) == kept
