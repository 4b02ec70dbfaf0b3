import random

import pytest

from omni_proxy.config.fields import POLICIES
from omni_proxy.config.schema import CacheAwareConfig, RoutingConfig
from omni_proxy.fleet.health_state import Health
from omni_proxy.routing import policies
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.session_load import DROPPED_PER_SLICE
from omni_proxy.wire.errors import HttpError
from tests.routing.policies.chats import NEED, build, chat, first, weighing, workers


def sticky(policy="round_robin", **more):
    return build(policy, sticky_sessions=True, **more)


@pytest.mark.parametrize("name", POLICIES)
def test_a_key_stays_with_its_worker_under_any_policy(name):
    policy, fleet = sticky(name, below=random.Random(4).randrange), workers(0, 0, 0)
    assert (policy.name, policy.needs_affinity_key) == (name, True)
    home = policy.pick(fleet, chat("hello", key="me"))
    for number in range(9):
        home.in_flight += 5
        assert policy.pick(fleet, chat(f"{number}" * 50, key="me")) is home


def test_a_worker_that_is_no_candidate_loses_the_session_for_good():
    policy, fleet = sticky(), workers(0, 0, 0)
    home = policy.pick(fleet, Requirements(0, affinity_key="me"))
    left = [worker for worker in fleet if worker is not home]
    new = policy.pick(left, Requirements(0, affinity_key="me"))
    assert new is not home
    assert policy.pick(fleet, Requirements(0, affinity_key="me")) is new


def test_requests_without_a_key_go_by_the_policy_below():
    policy, fleet = sticky(), workers(0, 0, 0)
    assert [policy.pick(fleet, NEED) for _ in range(3)] == fleet
    assert policy.stats()["sticky"]["sessions"] == 0


def test_an_idle_session_is_forgotten_and_a_used_one_is_not():
    policy, fleet = sticky(sticky_idle_secs=10), workers(0, 0)
    policy.pick(fleet, Requirements(0, affinity_key="idle"))
    policy.pick(fleet, Requirements(0, affinity_key="used"))
    policy.maintain(8.0)
    policy.pick(fleet, Requirements(0, affinity_key="used"))
    policy.maintain(11.0)
    assert policy.stats()["sticky"]["sessions"] == 1
    assert (
        policy.preview_pick(fleet, Requirements(0, affinity_key="used"))[1]
        == "its session stays there"
    )
    assert policy.preview_pick(fleet, Requirements(0, affinity_key="idle"))[1].startswith(
        "a new session: "
    )


def test_an_idle_session_that_was_not_dropped_yet_counts_no_more():
    policy, fleet = sticky(sticky_idle_secs=10), workers(0, 0)
    for number in range(DROPPED_PER_SLICE + 2):
        policy.pick(fleet, Requirements(0, affinity_key=f"{number}"))
    policy.maintain(11.0)
    assert policy.stats()["sticky"]["sessions"] == 2
    last = Requirements(0, affinity_key=f"{DROPPED_PER_SLICE + 1}")
    assert policy.preview_pick(fleet, last)[1].startswith("a new session")


def test_a_session_without_an_end_is_kept():
    policy, fleet = sticky(sticky_idle_secs=0), workers(0, 0)
    policy.pick(fleet, Requirements(0, affinity_key="me"))
    policy.maintain(1e9)
    assert policy.stats()["sticky"]["sessions"] == 1


def test_only_so_many_sessions_are_remembered_those_used_last():
    policy, fleet = sticky(sticky_max=3), workers(0, 0)
    for key in ("a", "b", "c", "a", "d"):
        policy.pick(fleet, Requirements(0, affinity_key=key))
    reported = {
        key: policy.preview_pick(fleet, Requirements(0, affinity_key=key))[1] for key in "abcd"
    }
    assert [key for key, why in reported.items() if why == "its session stays there"] == list("acd")


def test_the_cache_aware_policy_learns_of_what_sessions_send():
    policy, fleet = sticky("cache_aware"), workers(0, 0)
    home = policy.pick(fleet, chat("one", key="me"))
    policy.pick(fleet, chat("w" * 99, key="me"))
    assert policy.preview_pick(fleet, chat("w" * 99))[0] is home
    assert policy.explain_pick(fleet, chat("w" * 99))["matched_bytes"][home.url] == 99


def test_a_preview_begins_no_session():
    policy, fleet = sticky(), workers(0, 0, 0)
    chosen = policy.preview_pick(fleet, Requirements(0, affinity_key="me"))[0]
    assert not any(policy.stats()["sticky"].values())
    assert policy.pick(fleet, Requirements(0, affinity_key="me")) is chosen


def routing(policy="cache_aware", *, sessions, **more):
    return RoutingConfig(policy=policy, sticky_sessions=sessions, **more)


def test_switching_sessions_keeps_the_tree_and_switching_policies_keeps_the_sessions():
    fleet = workers(0, 0)
    plain = policies.build_policy(routing(sessions=False), first, 0.0)
    home = plain.pick(fleet, chat("w" * 99))
    with_sessions = policies.build_policy(routing(sessions=True), first, 0.0, plain)
    assert with_sessions.pick(fleet, chat("w" * 99, key="me")) is home
    at_random = policies.build_policy(routing("random", sessions=True), first, 0.0, with_sessions)
    assert at_random.name == "random"
    assert at_random.pick(fleet, Requirements(0, affinity_key="me")) is home
    bare = policies.build_policy(routing("random", sessions=False), first, 0.0, at_random)
    assert (bare.name, bare.needs_affinity_key) == ("random", False)


def test_a_policy_whose_name_stays_is_reconfigured_in_place():
    policy = sticky("cache_aware")
    rules = CacheAwareConfig(max_tree_size=77)
    changed = routing(sessions=True, sticky_max=5, cache_aware=rules)
    assert policies.build_policy(changed, first, 0.0, policy) is policy
    assert policy.stats()["max_tree_size"] == 77
    without = policies.build_policy(routing(sessions=False), first, 0.0, policy)
    assert without is policy.inner


def test_forgetting_reaches_the_policy_below():
    policy, fleet = sticky("cache_aware"), workers(0, 0)
    home = policy.pick(fleet, chat("w" * 99, key="me"))
    policy.forget_worker(home)
    assert policy.explain_pick(fleet, chat("w" * 99))["matched_bytes"][home.url] == 0
    assert policy.pick(fleet, chat("w" * 99, key="me")) is home


def session(key, mask=0, model=None):
    return Requirements(mask, model=model, affinity_key=key)


def counted(policy, fleet):
    return [policy.session_count(worker) for worker in fleet]


def by_sessions(policy="least_request", **more):
    return sticky(policy, sticky_load="sessions", **more)


def test_a_new_session_takes_the_worker_with_the_fewest_sessions():
    policy, fleet = by_sessions(), workers(0, 0, 0)
    for number in range(9):
        policy.pick(fleet, session(f"{number}"))
    assert counted(policy, fleet) == [3, 3, 3]
    for number in range(9, 12):  # idle sessions count, and requests of others do not
        fleet[number % 3].in_flight += 40
        policy.pick(fleet, session(f"{number}"))
    assert counted(policy, fleet) == [4, 4, 4]


def test_of_equal_session_counts_the_idlest_worker_gets_the_session():
    policy, fleet = by_sessions(), workers(2, 0, 1)
    chosen, why = policy.preview_pick(fleet, session("a"))
    assert (chosen, why) == (
        fleet[1],
        "a new session: the fewest sessions of 3: 0, 0 in flight",
    )
    assert [policy.pick(fleet, session(key)) for key in "abc"] == [fleet[1], fleet[2], fleet[0]]


def test_a_worker_has_sessions_by_its_weight():
    policy, fleet = by_sessions(), weighing(3, 1)
    for number in range(40):
        policy.pick(fleet, session(f"{number}"))
    assert counted(policy, fleet) == [30, 10]


def test_a_finished_session_is_no_load_and_finishing_twice_is_no_harm():
    policy, fleet = by_sessions(), workers(0, 0)
    for number in range(6):
        policy.pick(fleet, session(f"{number}"))
    home = policy.pick(fleet, session("0"))
    assert [policy.finish_session("0"), policy.finish_session("0")] == [True, False]
    assert policy.finish_session("never seen") is False
    assert policy.session_count(home) == 2
    assert policy.stats()["sticky"]["finished"] == 1
    assert policy.pick(fleet, session("new")) is home


def test_sessions_that_expire_or_are_pushed_out_are_no_load():
    policy, fleet = by_sessions(sticky_idle_secs=10, sticky_max=4), workers(0, 0)
    for number in range(9):
        policy.pick(fleet, session(f"{number}"))
    assert sum(counted(policy, fleet)) == 4
    policy.maintain(11.0)
    assert counted(policy, fleet) == [0, 0]


def test_a_session_that_moves_is_counted_where_it_is():
    policy, fleet = by_sessions(), workers(0, 0)
    home = policy.pick(fleet, session("a"))
    (other,) = (worker for worker in fleet if worker is not home)
    assert policy.pick([other], session("a")) is other
    assert (policy.session_count(home), policy.session_count(other)) == (0, 1)
    assert policy.stats()["sticky"]["moved"] == 1


def test_requests_without_a_key_are_the_inner_policys_also_where_sessions_count():
    policy, fleet = by_sessions("round_robin"), workers(0, 0, 0)
    assert [policy.pick(fleet, NEED) for _ in range(3)] == fleet


def test_the_prefix_tree_learns_where_new_sessions_begin():
    policy, fleet = by_sessions("cache_aware"), workers(0, 0)
    home = policy.pick(fleet, chat("w" * 99, key="a"))
    assert policy.explain_pick(fleet, chat("w" * 99))["matched_bytes"][home.url] == 99


@pytest.mark.parametrize(
    ("loads", "moves"),
    [((7, 0), False), ((8, 0), True), ((30, 21), False), ((30, 20), True), ((16, 8), True)],
    ids=["too few", "enough", "not so many times", "both", "both by the least"],
)
def test_the_gate_opens_where_a_worker_has_so_many_more_and_so_many_times_as_many(loads, moves):
    policy = sticky("least_request", sticky_rebalance_abs=8, sticky_rebalance_rel=1.5)
    fleet = workers(0, 0)
    home = policy.pick(fleet, session("a"))
    assert home is fleet[0]
    home.in_flight, fleet[1].in_flight = loads
    expected = fleet[1] if moves else home
    preview, why = policy.preview_pick(fleet, session("a"))
    assert (preview, "moves" in why) == (expected, moves)
    assert policy.pick(fleet, session("a")) is expected
    assert policy.session_count(expected) == 1
    assert policy.stats()["sticky"]["rebalanced"] == moves
    home.in_flight = fleet[1].in_flight = 0
    assert policy.pick(fleet, session("a")) is expected


def test_without_a_gate_no_load_moves_a_session():
    policy, fleet = sticky("least_request"), workers(0, 0)
    home = policy.pick(fleet, session("a"))
    home.in_flight = 10_000
    assert policy.pick(fleet, session("a")) is home


def holding(*reasons, gone=()):
    policy, fleet = sticky("least_request"), workers(0, 0, 0)
    policy.hold_for(frozenset(reasons), lambda worker: worker not in gone)
    home = policy.pick(fleet, session("a"))
    home.health.state = Health.HEALTHY
    return policy, home, [worker for worker in fleet if worker is not home]


@pytest.mark.parametrize(
    ("reasons", "code"),
    [
        (("updating",), "weights_updating"),
        (("paused",), "paused"),
        (("paused", "updating"), "weights_updating"),
    ],
)
def test_a_session_of_a_paused_or_updating_worker_waits_for_it(reasons, code):
    policy, home, others = holding("paused", "updating")
    home.cordon_reasons = set(reasons)
    for choose in (policy.pick, policy.preview_pick):
        with pytest.raises(HttpError) as held:
            choose(others, session("a"))
        assert (held.value.status, held.value.code) == (503, code)
        assert home.url in held.value.message
    assert policy.held_worker(session("a")) is home
    assert policy.held_worker(session("b")) is None
    assert policy.pick(others, session("b")) in others  # a session of its own
    home.cordon_reasons.clear()
    assert policy.held_worker(session("a")) is None
    assert policy.pick([home, *others], session("a")) is home


@pytest.mark.parametrize(
    "change",
    [
        lambda home: home.cordon_reasons.add("uncertain"),
        lambda home: home.cordon_reasons.add("rollout"),
        lambda home: setattr(home, "disabled", True),
        lambda home: setattr(home.health, "state", Health.DEAD),
        lambda home: setattr(home, "model", "another"),
        lambda home: setattr(home, "mask", 0),
        lambda home: home.cordon_reasons.clear(),
    ],
    ids=["uncertain", "in a rollout", "disabled", "dead", "another model", "unable", "full"],
)
def test_a_session_moves_where_its_worker_is_out_for_more_than_that(change):
    policy, home, others = holding("paused", "updating")
    home.cordon_reasons = {"updating"}
    need = session("a", mask=1, model="mine")
    home.mask, home.model = 1, "mine"
    assert policy.held_worker(need) is home
    change(home)
    assert policy.held_worker(need) is None
    assert policy.pick(others, need) in others


def test_a_session_is_not_held_where_requests_may_not_wait_or_its_worker_has_left():
    for policy, home, others in (holding(), holding("paused")):
        home.cordon_reasons = {"updating"}
        assert policy.held_worker(session("a")) is None
        assert policy.pick(others, session("a")) in others
    gone = []
    policy, home, others = holding("updating", gone=gone)
    home.cordon_reasons = {"updating"}
    gone.append(home)
    assert policy.pick(others, session("a")) in others
