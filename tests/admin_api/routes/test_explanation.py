from omni_proxy.admin_api.routes.explain_routes import explanation_record
from omni_proxy.fleet.worker import CAPABILITY_BITS
from omni_proxy.routing.disaggregation.explanation import explain_placement
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import explain
from omni_proxy.routing.routes import BOTH_ENGINES
from omni_proxy.routing.version_constraint import VersionConstraint
from tests.fleet.entries import entry, fleet_of
from tests.routing.disaggregation.pools_fixture import pools_of
from tests.routing.policies.chats import build, chat

CHAT = CAPABILITY_BITS["chat"]


def record(fleet, need, policy):
    return explanation_record(explain_placement(fleet, need, policy, pools_of()), need)


def chat_requirements(text):
    need = chat(text)
    need.mask = CHAT
    return need


def test_the_pick_has_the_policy_s_reason():
    explanation = record(fleet_of(entry("a"), entry("b")), Requirements(CHAT), build("round_robin"))
    assert explanation["pick"]["reason"] == "next in turn: 1 of 2"
    assert explanation["policy"] == "round_robin"


def test_a_cache_aware_pick_reports_its_match_and_worker():
    fleet, policy = fleet_of(entry("a"), entry("b")), build("cache_aware")
    policy.pick(fleet.workers[:1], chat_requirements("x" * 80))
    explanation = record(fleet, chat_requirements("x" * 100), policy)["pick"]
    assert explanation["url"] == "http://a:1"
    assert explanation["reason"] == "80 of 100 bytes match, held by a:1"
    assert explanation["text_bytes"] == 100
    assert explanation["matched_bytes"] == {"http://a:1": 80, "http://b:1": 0}


def test_without_an_eligible_worker_there_is_an_error_and_no_pick():
    fleet = fleet_of(entry("a", disabled=True))
    explanation = record(fleet, Requirements(CHAT), build("cache_aware"))
    assert (explanation["pick"], explanation["refusal"]["code"]) == (None, "all_disabled")
    assert explanation["workers"][0]["reasons"] == ["disabled"]


def test_an_explanation_has_the_served_and_requested_weight_versions():
    fleet = fleet_of(entry("a"), entry("b"))
    fleet.set_version(fleet.workers[0], "v1", 1)
    need = Requirements(CHAT, version_constraint=VersionConstraint("v1", 1))
    explanation = record(fleet, need, build("round_robin"))
    rows = [
        (row["weight_version"], row["weight_epoch"], row["reasons"])
        for row in explanation["workers"]
    ]
    constraint = "'v1' of epoch 1 or later"
    assert rows == [("v1", 1, []), (None, 0, [f"has weights unknown, not {constraint}"])]
    assert (explanation["need"]["weights"], explanation["pick"]["url"]) == (
        constraint,
        "http://a:1",
    )
    assert record(fleet, Requirements(CHAT), build("round_robin"))["need"]["weights"] is None


def test_explaining_does_not_change_the_policy():
    fleet, policy = fleet_of(entry("a"), entry("b")), build("cache_aware")
    before = policy.stats()
    explain(fleet, chat_requirements("x" * 100), policy)
    assert policy.stats() == before


def test_a_pair_has_both_picks_and_a_single_decode_worker_the_reason():
    fleet = fleet_of(
        entry("p", role="prefill", kv_connector="nixl"),
        entry("d", role="decode", kv_connector="nixl"),
    )
    need = Requirements(CHAT, legs=BOTH_ENGINES)
    explanation = record(fleet, need, build("round_robin"))
    assert (explanation["pick"]["url"], explanation["prefill"]["pick"]["url"]) == (
        "http://d:1",
        "http://p:1",
    )
    assert explanation["prefill"]["pick"]["reason"] == "next in turn: 1 of 1"
    fleet.cordon(fleet.workers[0], "paused")
    explanation = record(fleet, need, build("round_robin"))
    assert (explanation["pick"]["url"], explanation["prefill"]["pick"]) == ("http://d:1", None)
    assert "no prefill worker can" in explanation["prefill"]["reason"]
    assert [row["role"] for row in explanation["workers"]] == ["prefill", "decode"]
