from omni_proxy.fleet.dp_rank import DpRank, with_ranks
from omni_proxy.fleet.worker import Worker
from tests.fleet.entries import NOW, entry, fleet_of, heal


def names(targets) -> list[str]:
    return [target.display_id for target in targets]


def apply(fleet, *entries):
    fleet.apply(entries, NOW)


def test_a_worker_with_ranks_is_replaced_by_them_and_turns_alternate_over_workers():
    fleet = fleet_of(entry("a", ranks=2), entry("b"), entry("c", ranks=3))
    assert fleet.has_ranks
    assert names(fleet.candidates(None, 1)) == ["a:1@0", "b:1", "c:1@0", "a:1@1", "c:1@1", "c:1@2"]
    assert names(fleet.workers) == ["a:1", "b:1", "c:1"]


def test_a_fleet_without_ranks_hands_out_its_workers():
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
    assert (rank.weight_version, rank.weight_epoch, rank.cordon_reasons) == ("v7", 7, {"paused"})
    assert not rank.routable
    assert fleet.candidates(None, 1) == []


def test_every_attribute_of_a_worker_can_be_read_at_its_rank():
    rank = fleet_of(entry("a", ranks=2)).workers[0].dp_ranks[0]
    for kind in Worker.__mro__[:-1]:
        for name in kind.__slots__:
            getattr(rank, name)


def test_ranks_are_the_same_objects_after_each_change_of_their_number():
    fleet = fleet_of(entry("a", ranks=4, max_inflight=8))
    worker = fleet.workers[0]
    before = worker.dp_ranks
    left = []
    fleet.watch_replaced(left.append)
    apply(fleet, entry("a", ranks=2, max_inflight=8))
    assert worker.dp_ranks == before[:2]
    assert left == list(before[2:])
    assert [rank.max_inflight for rank in worker.dp_ranks] == [4, 4]
    assert fleet.candidates(None, 1) == list(before[:2])
    apply(fleet, entry("a", max_inflight=8))
    assert (worker.dp_ranks, fleet.has_ranks, left) == ((), False, [*before[2:], *before[:2]])
    assert fleet.candidates(None, 1) == [worker]
    apply(fleet, entry("a", ranks=4))
    assert worker.dp_ranks == before
    assert left[-1] is worker
    assert [rank.max_inflight for rank in worker.dp_ranks] == [0] * 4


def test_ranks_of_an_engine_count_once_it_has_reported_them():
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


def test_a_worker_added_again_under_its_url_has_new_ranks():
    fleet = fleet_of(entry("a", ranks=2))
    before = fleet.workers[0]
    apply(fleet)
    assert not fleet.has_ranks
    apply(fleet, entry("a", ranks=2))
    after = fleet.workers[0]
    heal(fleet, after)
    assert not set(before.dp_ranks) & set(after.dp_ranks)
    assert fleet.known_ranks(before) == ()
