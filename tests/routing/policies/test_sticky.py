import random

import pytest

from omni_proxy.config.fields import POLICIES
from omni_proxy.config.schema import CacheAwareConfig, RoutingConfig
from omni_proxy.fleet.health_state import Health
from omni_proxy.routing import policies
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.session_load import DROPPED_PER_SLICE
from omni_proxy.wire.errors import HttpError
from tests.routing.policies.chats import NEED, build, chat, first, weighted, workers


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


def test_a_worker_that_is_not_a_candidate_loses_the_session_permanently():
    policy, fleet = sticky(), workers(0, 0, 0)
    home = policy.pick(fleet, Requirements(0, affinity_key="me"))
    others = [worker for worker in fleet if worker is not home]
    new = policy.pick(others, Requirements(0, affinity_key="me"))
    assert new is not home
    assert policy.pick(fleet, Requirements(0, affinity_key="me")) is new


def test_requests_without_a_key_are_picked_by_the_inner_policy():
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


def test_an_idle_session_that_is_not_yet_dropped_no_longer_counts():
    policy, fleet = sticky(sticky_idle_secs=10), workers(0, 0)
    for number in range(DROPPED_PER_SLICE + 2):
        policy.pick(fleet, Requirements(0, affinity_key=f"{number}"))
    policy.maintain(11.0)
    assert policy.stats()["sticky"]["sessions"] == 2
    last = Requirements(0, affinity_key=f"{DROPPED_PER_SLICE + 1}")
    assert policy.preview_pick(fleet, last)[1].startswith("a new session")


def test_without_an_idle_limit_a_session_is_kept():
    policy, fleet = sticky(sticky_idle_secs=0), workers(0, 0)
    policy.pick(fleet, Requirements(0, affinity_key="me"))
    policy.maintain(1e9)
    assert policy.stats()["sticky"]["sessions"] == 1


def test_the_number_of_sessions_is_bounded_and_the_last_used_are_kept():
    policy, fleet = sticky(sticky_max=3), workers(0, 0)
    for key in ("a", "b", "c", "a", "d"):
        policy.pick(fleet, Requirements(0, affinity_key=key))
    reasons = {
        key: policy.preview_pick(fleet, Requirements(0, affinity_key=key))[1] for key in "abcd"
    }
    assert [key for key, reason in reasons.items() if reason == "its session stays there"] == list(
        "acd"
    )


def test_the_cache_aware_policy_stores_the_prompts_of_sessions():
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


def test_a_reload_that_changes_sessions_or_the_policy_keeps_the_other():
    fleet = workers(0, 0)
    plain = policies.build_policy(routing(sessions=False), first, 0.0)
    home = plain.pick(fleet, chat("w" * 99))
    with_sessions = policies.build_policy(routing(sessions=True), first, 0.0, plain)
    assert with_sessions.pick(fleet, chat("w" * 99, key="me")) is home
    at_random = policies.build_policy(routing("random", sessions=True), first, 0.0, with_sessions)
    assert at_random.name == "random"
    assert at_random.pick(fleet, Requirements(0, affinity_key="me")) is home
    without_sessions = policies.build_policy(
        routing("random", sessions=False), first, 0.0, at_random
    )
    assert (without_sessions.name, without_sessions.needs_affinity_key) == ("random", False)


def test_a_policy_whose_name_stays_is_reconfigured_in_place():
    policy = sticky("cache_aware")
    rules = CacheAwareConfig(max_tree_size=77)
    changed = routing(sessions=True, sticky_max=5, cache_aware=rules)
    assert policies.build_policy(changed, first, 0.0, policy) is policy
    assert policy.stats()["max_tree_size"] == 77
    without_sessions = policies.build_policy(routing(sessions=False), first, 0.0, policy)
    assert without_sessions is policy.inner


def test_the_inner_policy_also_forgets_a_worker():
    policy, fleet = sticky("cache_aware"), workers(0, 0)
    home = policy.pick(fleet, chat("w" * 99, key="me"))
    policy.forget_worker(home)
    assert policy.explain_pick(fleet, chat("w" * 99))["matched_bytes"][home.url] == 0
    assert policy.pick(fleet, chat("w" * 99, key="me")) is home


def session(key, mask=0, model=None):
    return Requirements(mask, model=model, affinity_key=key)


def session_counts(policy, fleet):
    return [policy.session_count(worker) for worker in fleet]


def by_sessions(policy="least_request", **more):
    return sticky(policy, sticky_load="sessions", **more)


def test_a_new_session_goes_to_the_worker_with_the_fewest_sessions():
    policy, fleet = by_sessions(), workers(0, 0, 0)
    for number in range(9):
        policy.pick(fleet, session(f"{number}"))
    assert session_counts(policy, fleet) == [3, 3, 3]
    for number in range(9, 12):  # sessions count even if idle, other requests do not
        fleet[number % 3].in_flight += 40
        policy.pick(fleet, session(f"{number}"))
    assert session_counts(policy, fleet) == [4, 4, 4]


def test_of_workers_with_equally_many_sessions_the_least_loaded_is_picked():
    policy, fleet = by_sessions(), workers(2, 0, 1)
    chosen, reason = policy.preview_pick(fleet, session("a"))
    assert (chosen, reason) == (
        fleet[1],
        "a new session: the fewest sessions of 3: 0, 0 in flight",
    )
    assert [policy.pick(fleet, session(key)) for key in "abc"] == [fleet[1], fleet[2], fleet[0]]


def test_sessions_are_in_proportion_to_the_weight():
    policy, fleet = by_sessions(), weighted(3, 1)
    for number in range(40):
        policy.pick(fleet, session(f"{number}"))
    assert session_counts(policy, fleet) == [30, 10]


def test_a_finished_session_no_longer_counts_and_can_be_finished_twice():
    policy, fleet = by_sessions(), workers(0, 0)
    for number in range(6):
        policy.pick(fleet, session(f"{number}"))
    home = policy.pick(fleet, session("0"))
    assert [policy.finish_session("0"), policy.finish_session("0")] == [True, False]
    assert policy.finish_session("never seen") is False
    assert policy.session_count(home) == 2
    assert policy.stats()["sticky"]["finished"] == 1
    assert policy.pick(fleet, session("new")) is home


def test_expired_and_displaced_sessions_no_longer_count():
    policy, fleet = by_sessions(sticky_idle_secs=10, sticky_max=4), workers(0, 0)
    for number in range(9):
        policy.pick(fleet, session(f"{number}"))
    assert sum(session_counts(policy, fleet)) == 4
    policy.maintain(11.0)
    assert session_counts(policy, fleet) == [0, 0]


def test_a_moved_session_counts_at_its_new_worker():
    policy, fleet = by_sessions(), workers(0, 0)
    home = policy.pick(fleet, session("a"))
    (other,) = (worker for worker in fleet if worker is not home)
    assert policy.pick([other], session("a")) is other
    assert (policy.session_count(home), policy.session_count(other)) == (0, 1)
    assert policy.stats()["sticky"]["moved"] == 1


def test_requests_without_a_key_use_the_inner_policy_if_sessions_are_the_load():
    policy, fleet = by_sessions("round_robin"), workers(0, 0, 0)
    assert [policy.pick(fleet, NEED) for _ in range(3)] == fleet


def test_the_prefix_tree_stores_the_first_prompt_of_a_session():
    policy, fleet = by_sessions("cache_aware"), workers(0, 0)
    home = policy.pick(fleet, chat("w" * 99, key="a"))
    assert policy.explain_pick(fleet, chat("w" * 99))["matched_bytes"][home.url] == 99


@pytest.mark.parametrize(
    ("loads", "moves"),
    [((7, 0), False), ((8, 0), True), ((30, 21), False), ((30, 20), True), ((16, 8), True)],
    ids=["below the gap", "idle target", "below the ratio", "exactly the ratio", "exactly the gap"],
)
def test_a_session_moves_if_both_the_gap_and_the_ratio_are_reached(loads, moves):
    policy = sticky("least_request", sticky_rebalance_abs=8, sticky_rebalance_rel=1.5)
    fleet = workers(0, 0)
    home = policy.pick(fleet, session("a"))
    assert home is fleet[0]
    home.in_flight, fleet[1].in_flight = loads
    expected = fleet[1] if moves else home
    previewed, reason = policy.preview_pick(fleet, session("a"))
    assert (previewed, "moves" in reason) == (expected, moves)
    assert policy.pick(fleet, session("a")) is expected
    assert policy.session_count(expected) == 1
    assert policy.stats()["sticky"]["rebalanced"] == moves
    home.in_flight = fleet[1].in_flight = 0
    assert policy.pick(fleet, session("a")) is expected


def test_without_thresholds_no_load_moves_a_session():
    policy, fleet = sticky("least_request"), workers(0, 0)
    home = policy.pick(fleet, session("a"))
    home.in_flight = 10_000
    assert policy.pick(fleet, session("a")) is home


def sticky_with_hold(*reasons, gone=()):
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
    policy, home, others = sticky_with_hold("paused", "updating")
    home.cordon_reasons = set(reasons)
    for choose in (policy.pick, policy.preview_pick):
        with pytest.raises(HttpError) as held:
            choose(others, session("a"))
        assert (held.value.status, held.value.code) == (503, code)
        assert home.url in held.value.message
    assert policy.held_worker(session("a")) is home
    assert policy.held_worker(session("b")) is None
    assert policy.pick(others, session("b")) in others  # another session
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
def test_a_session_moves_if_its_worker_is_unavailable_for_another_reason(change):
    policy, home, others = sticky_with_hold("paused", "updating")
    home.cordon_reasons = {"updating"}
    need = session("a", mask=1, model="mine")
    home.mask, home.model = 1, "mine"
    assert policy.held_worker(need) is home
    change(home)
    assert policy.held_worker(need) is None
    assert policy.pick(others, need) in others


def test_a_session_is_not_held_if_requests_may_not_wait_or_its_worker_left():
    for policy, home, others in (sticky_with_hold(), sticky_with_hold("paused")):
        home.cordon_reasons = {"updating"}
        assert policy.held_worker(session("a")) is None
        assert policy.pick(others, session("a")) in others
    gone = []
    policy, home, others = sticky_with_hold("updating", gone=gone)
    home.cordon_reasons = {"updating"}
    gone.append(home)
    assert policy.pick(others, session("a")) in others
