from omni_proxy.fleet.dp_rank import DpRank, with_ranks
from omni_proxy.fleet.worker import Worker
from tests.fleet.entries import NOW, entry, fleet_of, heal


def names(targets) -> list[str]:
    return [target.display_id for target in targets]


def apply(fleet, *entries):
    fleet.apply(entries, NOW)


def test_candidates_have_the_ranks_of_all_workers_in_alternation():
    fleet = fleet_of(entry("a", ranks=2), entry("b"), entry("c", ranks=3))
    assert fleet.has_ranks
    assert names(fleet.candidates(None, 1)) == ["a:1@0", "b:1", "c:1@0", "a:1@1", "c:1@1", "c:1@2"]
    assert names(fleet.workers) == ["a:1", "b:1", "c:1"]


def test_the_candidates_of_a_fleet_without_ranks_are_its_workers():
    fleet = fleet_of(entry("a"), entry("b", ranks="auto"))
    assert not fleet.has_ranks
    assert fleet.candidates(None, 1) == fleet.workers
    assert with_ranks(fleet.workers) == fleet.workers


def test_a_rank_has_its_workers_health_weights_and_settings():
    fleet = fleet_of(entry("a", ranks=2, weight=3, model="m", max_inflight=5))
    worker = fleet.workers[0]
    rank = worker.dp_ranks[1]
    assert isinstance(rank, DpRank)
    assert (rank.worker, rank.index, rank.url) == (worker, 1, "http://a:1@1")
    assert (rank.weight, rank.model, rank.max_inflight) == (3, "m", 3)
    assert rank.health is worker.health
    fleet.set_version(worker, "v7", 7)
    fleet.cordon(worker, "paused")
    assert (rank.weight_label, rank.weight_epoch, rank.cordon_reasons) == ("v7", 7, {"paused"})
    assert not rank.routable
    assert fleet.candidates(None, 1) == []


def test_every_attribute_of_a_worker_can_be_read_at_its_rank():
    rank = fleet_of(entry("a", ranks=2)).workers[0].dp_ranks[0]
    for kind in Worker.__mro__[:-1]:
        for name in kind.__slots__:
            getattr(rank, name)


def test_ranks_keep_their_objects_when_their_number_changes():
    fleet = fleet_of(entry("a", ranks=4, max_inflight=8))
    worker = fleet.workers[0]
    before = worker.dp_ranks
    replaced = []
    fleet.watch_replaced(replaced.append)
    apply(fleet, entry("a", ranks=2, max_inflight=8))
    assert worker.dp_ranks == before[:2]
    assert replaced == list(before[2:])
    assert [rank.max_inflight for rank in worker.dp_ranks] == [4, 4]
    assert fleet.candidates(None, 1) == list(before[:2])
    apply(fleet, entry("a", max_inflight=8))
    assert (worker.dp_ranks, fleet.has_ranks, replaced) == ((), False, [*before[2:], *before[:2]])
    assert fleet.candidates(None, 1) == [worker]
    apply(fleet, entry("a", ranks=4))
    assert worker.dp_ranks == before
    assert replaced[-1] is worker
    assert [rank.max_inflight for rank in worker.dp_ranks] == [0] * 4


def test_ranks_auto_takes_the_number_that_the_engine_reports():
    fleet = fleet_of(entry("a", ranks="auto"), entry("b", ranks=2))
    worker = fleet.workers[0]
    assert names(fleet.candidates(None, 1)) == ["a:1", "b:1@0", "b:1@1"]
    revision = fleet.revision
    fleet.report_ranks(worker, 3)
    assert fleet.revision > revision
    assert len(worker.dp_ranks) == 3
    revision = fleet.revision
    fleet.report_ranks(worker, 3)
    fleet.report_ranks(fleet.workers[1], 8)
    assert fleet.revision == revision
    assert len(fleet.workers[1].dp_ranks) == 2
    fleet.report_ranks(worker, 1)
    assert worker.dp_ranks == ()


def test_a_worker_added_again_with_the_same_url_has_new_ranks():
    fleet = fleet_of(entry("a", ranks=2))
    before = fleet.workers[0]
    apply(fleet)
    assert not fleet.has_ranks
    apply(fleet, entry("a", ranks=2))
    after = fleet.workers[0]
    heal(fleet, after)
    assert not set(before.dp_ranks) & set(after.dp_ranks)
    assert fleet.known_ranks(before) == ()
