"""Data-parallel ranks: their counts, limits, retries, and changes of their number."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.fleet.worker import FAILED, SUCCEEDED
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.routes import match_route
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import NOW, entry, fleet_of, heal

CHAT = match_route("POST", "/v1/chat/completions")


def dataplane_of(*entries, policy="round_robin"):
    config = parse(f'[routing]\npolicy = "{policy}"\n')
    return DataPlane(
        fleet_of(*entries), config, admin_socket="/nowhere", sources=Sources(lambda n: n - 1)
    )


def request(**need):
    exchange = Exchange(0.0, "1.1.1.1:1")
    exchange.route = CHAT
    exchange.requirements = Requirements(1, **need)
    return exchange


class RankCounts(RuleBasedStateMachine):
    """Compares the counts with a list of the requests in flight, each with its worker and rank."""

    @initialize(policy=st.sampled_from(["round_robin", "least_request", "power_of_two"]))
    def begin(self, policy):
        self.ranks = {"a": 3, "b": 1, "c": 2}
        self.bounds = {"a": 0, "b": 0, "c": 0}
        self.dataplane = dataplane_of(*self.entries(), policy=policy)
        self.fleet = self.dataplane.fleet
        self.open = []
        self.counted = {}

    def entries(self):
        return [
            entry(name, ranks=ranks, max_inflight=self.bounds[name])
            for name, ranks in self.ranks.items()
        ]

    @rule(name=st.sampled_from("abc"), ranks=st.integers(1, 4), bound=st.integers(0, 5))
    def the_configuration_changes(self, name, ranks, bound):
        self.ranks[name], self.bounds[name] = ranks, bound
        self.fleet.apply(self.entries(), NOW)

    @rule(name=st.sampled_from("abc"))
    def a_worker_is_replaced(self, name):
        self.fleet.apply([spec for spec in self.entries() if name not in spec.url], NOW)
        self.fleet.apply(self.entries(), NOW)
        heal(self.fleet, self.fleet.find(f"http://{name}:1"))

    @rule(dp_rank=st.sampled_from([-1, -1, -1, 0, 2]))
    def a_request_begins(self, dp_rank):
        before = {w: (w.in_flight, [r.in_flight for r in w.dp_ranks]) for w in self.fleet.workers}
        exchange = request(dp_rank=dp_rank)
        if not any(self.has_room(worker, dp_rank) for worker in self.fleet.workers):
            with pytest.raises(HttpError) as refused:
                self.dataplane.balancer.acquire(exchange)
            assert refused.value.status == (400 if dp_rank >= 0 and self.any_room() else 503)
            after = {w: (w.in_flight, [r.in_flight for r in w.dp_ranks]) for w in before}
            assert before == after
            return
        worker = self.dataplane.balancer.acquire(exchange)
        at = exchange.rank
        assert (at is None) == (not worker.dp_ranks)
        assert dp_rank in (-1, at.index if at else 0)
        if worker.max_inflight:
            assert worker.in_flight <= worker.max_inflight
            assert at is None or at.in_flight <= -(-worker.max_inflight // len(worker.dp_ranks))
        self.open.append((exchange, worker, at))
        if at is not None:
            self.counted[at] = self.counted.get(at, 0) + 1

    def any_room(self):
        return any(self.has_room(worker, -1) for worker in self.fleet.workers)

    def has_room(self, worker, index):
        if worker.max_inflight and worker.in_flight >= worker.max_inflight:
            return False
        ranks = worker.dp_ranks
        if not ranks:
            return index <= 0
        share = -(-worker.max_inflight // len(ranks))
        return any(
            (index in (-1, rank.index)) and not (share and rank.in_flight >= share)
            for rank in ranks
        )

    @rule(data=st.data(), result=st.sampled_from([SUCCEEDED, FAILED]))
    def a_request_ends(self, data, result):
        if self.open:
            exchange, worker, at = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            assert (exchange.worker, exchange.rank, exchange.sent_to) == (worker, at, at or worker)
            self.dataplane.balancer.release(exchange, worker, result)
            assert (exchange.worker, exchange.rank, exchange.sent_to) == (None, None, at or worker)

    @invariant()
    def the_counts_of_ranks_add_up_to_those_of_their_worker(self):
        for worker in self.fleet.workers:
            here = [at for _, of, at in self.open if of is worker]
            assert worker.in_flight == len(here)
            known = self.fleet.known_ranks(worker)
            assert {rank: rank.in_flight for rank in known} == {
                rank: here.count(rank) for rank in known
            }
            assert sum(rank.in_flight for rank in known) == len(here) - here.count(None)
            for rank in known:
                assert rank.routed.get("generation", 0) == self.counted.get(rank, 0)
                ended = sum(rank.succeeded.values()) + sum(rank.failed.values())
                assert ended == self.counted.get(rank, 0) - rank.in_flight
                assert rank.peak_in_flight >= rank.in_flight


TestRankCounts = RankCounts.TestCase


async def test_requests_are_spread_over_ranks_and_counted_at_both():
    dataplane = dataplane_of(entry("a", ranks=4), policy="least_request")
    exchanges = [request() for _ in range(8)]
    for exchange in exchanges:
        dataplane.balancer.acquire(exchange)
    (worker,) = dataplane.fleet.workers
    assert [rank.in_flight for rank in worker.dp_ranks] == [2, 2, 2, 2]
    assert (worker.in_flight, worker.peak_in_flight) == (8, 8)
    for exchange in exchanges:
        dataplane.balancer.release(exchange, worker, SUCCEEDED)
    assert (worker.in_flight, [rank.in_flight for rank in worker.dp_ranks]) == (0, [0] * 4)
    assert worker.succeeded == {"generation": 8}


@pytest.mark.parametrize(
    ("tried", "picked"),
    [([], "a:1@0"), (["a:1", "a:1@0"], "b:1"), (["a:1", "a:1@0", "b:1"], "a:1@1")],
)
async def test_another_worker_is_tried_before_another_rank(tried, picked):
    dataplane = dataplane_of(entry("a", ranks=2), entry("b"))
    (a, b), fleet = dataplane.fleet.workers, dataplane.fleet
    targets = {target.display_id: target for target in (a, b, *a.dp_ranks)}
    exchange = request()
    dataplane.balancer.acquire(exchange, {targets[name] for name in tried})
    assert exchange.sent_to.display_id == picked
    assert fleet.has_ranks


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (5, "data-parallel rank 5 does not exist; ranks that can take this request: a:1@0"),
        (1, "data-parallel rank 1 is full or out of rotation; .*: a:1@0"),
    ],
)
async def test_the_error_for_an_unavailable_rank_names_the_available_ones(index, message):
    dataplane = dataplane_of(entry("a", ranks=2, max_inflight=2))
    dataplane.balancer.acquire(request(dp_rank=1))
    with pytest.raises(HttpError, match=message) as refused:
        dataplane.balancer.acquire(request(dp_rank=index))
    assert (refused.value.status, refused.value.code) == (400, "invalid_rank")


async def test_a_request_for_a_rank_is_refused_as_any_other_while_all_ranks_are_full():
    dataplane = dataplane_of(entry("a", ranks=2, max_inflight=2))
    for _ in range(2):
        dataplane.balancer.acquire(request())
    with pytest.raises(HttpError) as refused:
        dataplane.balancer.acquire(request(dp_rank=1))
    assert (refused.value.status, refused.value.code) == (503, "all_full")
