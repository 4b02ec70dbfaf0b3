"""Picks while engines are overloaded: policies, pinning, sessions, ranks, retries and pairs."""

import random

import pytest

from omni_proxy.config.fields import POLICIES
from omni_proxy.config.schema import DisaggregationConfig, RoutingConfig
from omni_proxy.fleet.engine_load import LoadBounds
from omni_proxy.fleet.worker import CAPABILITY_BITS
from omni_proxy.routing.disaggregation.explanation import explain_placement
from omni_proxy.routing.disaggregation.pairing import Pairing, Policies, pick_placement
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import explain, pick_worker
from omni_proxy.routing.policies import build_policy
from omni_proxy.routing.routes import NAMED, match_route
from omni_proxy.wire.load_report import EngineLoad, LoadReport
from tests.fleet.entries import entry, fleet_of

CHAT = CAPABILITY_BITS["chat"]
VETO = "overloaded: 9 requests wait in its engine (limit: 8)"


def fleet_with(*entries, overloaded=()):
    fleet = fleet_of(*entries)
    fleet.loads.now = lambda: 0.0
    fleet.loads.configure(LoadBounds(8, 0.0, 5.0), [])
    for worker in fleet.workers:
        if worker.display_id in overloaded:
            fleet.loads.report(worker, EngineLoad(LoadReport(9.0, None), 0.0))
    return fleet


def policy_of(name="round_robin", **more):
    return build_policy(RoutingConfig(policy=name, **more), random.Random(1).randrange, 0.0)


def picks(fleet, policy, need=None, times=12, **more):
    need = need or Requirements(CHAT, affinity_key="x")
    return {pick_worker(fleet, need, policy, **more).display_id for _ in range(times)}


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_picks_an_overloaded_worker_while_there_is_another(name):
    fleet = fleet_with(entry("a"), entry("b"), entry("c"), overloaded=("a:1", "c:1"))
    assert picks(fleet, policy_of(name)) == {"b:1"}


@pytest.mark.parametrize("name", POLICIES)
def test_if_all_workers_are_overloaded_the_policy_picks_as_usual(name):
    overloaded = fleet_with(entry("a"), entry("b"), overloaded=("a:1", "b:1"))
    assert picks(overloaded, policy_of(name)) == picks(
        fleet_with(entry("a"), entry("b")), policy_of(name)
    )


def test_a_full_worker_is_no_alternative():
    fleet = fleet_with(entry("a"), entry("b", max_inflight=1), overloaded=("a:1",))
    fleet.workers[1].in_flight = 1
    assert picks(fleet, policy_of()) == {"a:1"}


def test_a_worker_named_by_the_request_is_picked_although_overloaded():
    fleet = fleet_with(entry("a"), entry("b"), overloaded=("a:1",))
    need = Requirements(CHAT, pinning=NAMED, named_worker=fleet.workers[0].url)
    assert picks(fleet, policy_of(), need) == {"a:1"}


def test_a_retry_prefers_an_untried_overloaded_worker_to_a_tried_one():
    fleet = fleet_with(entry("a"), entry("b"), overloaded=("a:1",))
    assert picks(fleet, policy_of(), tried=[fleet.workers[1]]) == {"a:1"}


def test_a_session_leaves_an_overloaded_worker_and_stays_away():
    fleet = fleet_with(entry("a"), entry("b"))
    policy, need = policy_of(sticky_sessions=True), Requirements(CHAT, affinity_key="s")
    home = pick_worker(fleet, need, policy)
    other = next(worker for worker in fleet.workers if worker is not home)
    fleet.loads.report(home, EngineLoad(LoadReport(9.0, None), 0.0))
    assert picks(fleet, policy, need) == {other.display_id}
    fleet.loads.report(home, EngineLoad(LoadReport(0.0, None), 0.0))
    assert picks(fleet, policy, need) == {other.display_id}  # it does not return
    assert policy.stats()["sticky"]["moved"] == 1


def test_each_rank_is_judged_by_its_own_load():
    fleet = fleet_with(entry("a", ranks=2), entry("b", ranks=2))
    a = fleet.workers[0]
    fleet.loads.report_engines(a, {0: LoadReport(9.0, None), 1: LoadReport(0.0, None)}, 0.0)
    assert picks(fleet, policy_of()) == {"a:1@1", "b:1@0", "b:1@1"}
    assert picks(fleet, policy_of(), Requirements(CHAT, dp_rank=0)) == {"b:1@0"}


def test_an_explanation_names_the_load_and_its_limit():
    fleet = fleet_with(entry("a"), entry("b"), entry("c", disabled=True), overloaded=("a:1",))
    explained = explain(fleet, Requirements(CHAT), policy_of())
    assert [reasons for _, reasons in explained.reasons] == [[VETO], [], ["disabled"]]
    assert explained.pick is fleet.workers[1]


def test_an_explanation_names_no_load_if_all_workers_are_overloaded():
    fleet = fleet_with(entry("a"), entry("b", disabled=True), overloaded=("a:1", "b:1"))
    explained = explain(fleet, Requirements(CHAT), policy_of())
    assert [reasons for _, reasons in explained.reasons] == [[], ["disabled"]]


POOLS = (
    entry("p", role="prefill"), entry("q", role="prefill"),
    entry("d", role="decode"), entry("e", role="decode"),
)  # fmt: skip


def pair_need():
    return Requirements(CHAT, legs=match_route("POST", "/generate").legs)


def pool_policies(**rules):
    routing = RoutingConfig(disaggregation=DisaggregationConfig(**rules))
    return PoolPolicies(routing, random.Random(1).randrange, lambda: 0.0)


@pytest.mark.parametrize(
    ("overloaded", "pairs"),
    [
        (("p:1", "d:1"), {("q:1", "e:1")}),
        (("p:1", "q:1", "e:1"), {("p:1", "d:1"), ("q:1", "d:1")}),
    ],
)
def test_each_leg_of_a_pair_avoids_overloaded_workers(overloaded, pairs):
    fleet = fleet_with(*POOLS, overloaded=overloaded)
    pairing, policies = Pairing(fleet), Policies(policy_of(), pool_policies())
    placements = [pick_placement(pairing, pair_need(), policies) for _ in range(8)]
    assert {(pair.prefill.display_id, pair.worker.display_id) for pair in placements} == pairs


def test_an_explanation_of_a_pair_names_the_overloaded_workers_of_each_leg():
    fleet = fleet_with(*POOLS, overloaded=("p:1", "d:1", "e:1"))
    explained = explain_placement(fleet, pair_need(), policy_of(), pool_policies())
    verdicts = {target.display_id: reasons for target, reasons in explained.explanation.reasons}
    assert verdicts == {"p:1": [VETO], "q:1": [], "d:1": [], "e:1": []}
    assert explained.prefill.worker.display_id == "q:1"
