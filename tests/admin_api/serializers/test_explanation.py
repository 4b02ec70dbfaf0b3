from omni_proxy.admin_api.routes.models_routes import explanation_record
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


def asked(text):
    need = chat(text)
    need.mask = CHAT
    return need


def test_the_pick_has_the_policy_s_reason():
    reported = record(fleet_of(entry("a"), entry("b")), Requirements(CHAT), build("round_robin"))
    assert reported["pick"]["reason"] == "next in turn: 1 of 2"
    assert reported["policy"] == "round_robin"


def test_a_cache_aware_pick_reports_its_match_and_worker():
    fleet, policy = fleet_of(entry("a"), entry("b")), build("cache_aware")
    policy.pick(fleet.workers[:1], asked("x" * 80))
    reported = record(fleet, asked("x" * 100), policy)["pick"]
    assert reported["url"] == "http://a:1"
    assert reported["reason"] == "80 of 100 bytes match, held by a:1"
    assert reported["text_bytes"] == 100
    assert reported["matched_bytes"] == {"http://a:1": 80, "http://b:1": 0}


def test_without_an_eligible_worker_there_is_an_error_and_no_pick():
    fleet = fleet_of(entry("a", disabled=True))
    reported = record(fleet, Requirements(CHAT), build("cache_aware"))
    assert (reported["pick"], reported["refusal"]["code"]) == (None, "all_disabled")
    assert reported["workers"][0]["reasons"] == ["disabled"]


def test_it_shows_served_and_requested_weight_versions():
    fleet = fleet_of(entry("a"), entry("b"))
    fleet.set_version(fleet.workers[0], "v1", 1)
    need = Requirements(CHAT, version_constraint=VersionConstraint("v1", 1))
    reported = record(fleet, need, build("round_robin"))
    rows = [
        (row["weight_version"], row["weight_epoch"], row["reasons"]) for row in reported["workers"]
    ]
    wanted = "'v1' of epoch 1 or later"
    assert rows == [("v1", 1, []), (None, 0, [f"has weights unknown, not {wanted}"])]
    assert (reported["need"]["weights"], reported["pick"]["url"]) == (wanted, "http://a:1")
    assert record(fleet, Requirements(CHAT), build("round_robin"))["need"]["weights"] is None


def test_asking_teaches_the_policy_nothing():
    fleet, policy = fleet_of(entry("a"), entry("b")), build("cache_aware")
    before = policy.stats()
    explain(fleet, asked("x" * 100), policy)
    assert policy.stats() == before


def test_a_pair_has_both_picks_and_a_decode_worker_alone_the_reason():
    fleet = fleet_of(
        entry("p", role="prefill", kv_connector="nixl"),
        entry("d", role="decode", kv_connector="nixl"),
    )
    need = Requirements(CHAT, legs=BOTH_ENGINES)
    reported = record(fleet, need, build("round_robin"))
    assert (reported["pick"]["url"], reported["prefill"]["pick"]["url"]) == (
        "http://d:1",
        "http://p:1",
    )
    assert reported["prefill"]["pick"]["reason"] == "next in turn: 1 of 1"
    fleet.cordon(fleet.workers[0], "paused")
    reported = record(fleet, need, build("round_robin"))
    assert (reported["pick"]["url"], reported["prefill"]["pick"]) == ("http://d:1", None)
    assert "no prefill worker can" in reported["prefill"]["reason"]
    assert [row["role"] for row in reported["workers"]] == ["prefill", "decode"]
