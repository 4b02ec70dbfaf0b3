import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.disaggregation.explanation import explain_placement
from omni_proxy.routing.disaggregation.pairing import (
    all_tried,
    could_take,
    is_eligible,
    pick_from_last_pools,
)
from omni_proxy.routing.disaggregation.partners import held_for_update
from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.prefix_text import LIMIT
from omni_proxy.routing.routes import (
    BOTH_ENGINES,
    DECODE_ALONE,
    NAMED,
    NO_MODEL,
    SGLANG_ONLY,
    VLLM_ONLY,
)
from omni_proxy.routing.version_constraint import VersionConstraint
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import NOW, entry, fleet_of
from tests.routing.disaggregation.pools_fixture import (
    CHAT,
    Chooser,
    name_of,
    pair_fleet,
    pools_of,
    request,
)


def refusal(fleet, need=None, pools=None):
    with pytest.raises(HttpError) as caught:
        Chooser(fleet, pools).place(need)
    return caught.value


def worker(fleet, name):
    return fleet.find(f"http://{name}:1")


def test_each_pool_has_its_own_rotation():
    chooser = Chooser(pair_fleet(prefills=2, decodes=3))
    picked = [chooser.names() for _ in range(6)]
    assert [decode for decode, _ in picked] == ["d0", "d1", "d2"] * 2
    assert [prefill for _, prefill in picked] == ["p0", "p1"] * 3


def test_each_pool_has_its_configured_policy():
    pools = pools_of(prefill_policy="least_request", decode_policy="round_robin")
    fleet = pair_fleet()
    worker(fleet, "p0").in_flight = 5
    chooser = Chooser(fleet, pools)
    assert [chooser.names() for _ in range(2)] == [("d0", "p1"), ("d1", "p1")]


def test_a_reload_keeps_the_rotation_of_a_policy_whose_name_stays():
    pools = pools_of()
    chooser = Chooser(pair_fleet(), pools)
    assert chooser.names() == ("d0", "p0")
    pools.configure(pools._routing)
    assert chooser.names() == ("d1", "p1")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"kv_connector": "mooncake"}, "no_pair"),
        ({"model": "other"}, "no_pair"),
    ],
)
def test_workers_with_different_connectors_or_models_never_pair(fields, code):
    common = {"kv_connector": "nixl", "model": "m"}
    fleet = fleet_of(
        entry("p0", role="prefill", **(common | fields)), entry("d0", role="decode", **common)
    )
    error = refusal(fleet, pools=pools_of(fallback="refuse"))
    assert (error.status, error.code) == (503, code)


def test_both_workers_of_a_pair_have_the_same_weight_version():
    fleet = pair_fleet(prefills=2, decodes=2)
    for name in ("p1", "d1"):
        fleet.set_version(worker(fleet, name), "v2", 2)
    chooser = Chooser(fleet)
    assert {chooser.names() for _ in range(6)} == {("d0", "p0"), ("d1", "p1")}
    fleet.set_version(worker(fleet, "p0"), "v2", 2)
    assert {chooser.names()[0] for _ in range(6)} == {"d1"}
    fleet.set_version(worker(fleet, "p1"), "v1", 1)
    fleet.mark_dead(worker(fleet, "p0"), NOW)
    error = refusal(fleet)
    assert error.code == "weight_versions_differ"
    assert "v1" in error.message
    assert "v2" in error.message


def test_an_unknown_label_does_not_prevent_a_pair_but_another_epoch_does():
    fleet = pair_fleet(1, 1)
    fleet.set_version(worker(fleet, "p0"), "v1", 0)
    assert Chooser(fleet).names() == ("d0", "p0")
    fleet.set_version(worker(fleet, "p0"), "v1", 1)
    assert refusal(fleet).code == "weight_versions_differ"


def test_a_retry_picks_untried_workers():
    fleet = pair_fleet(2, 2)
    chooser = Chooser(fleet)
    p0, p1, d0, d1 = fleet.workers
    assert {chooser.names(tried={p0}) for _ in range(4)} == {("d0", "p1"), ("d1", "p1")}
    assert {chooser.names(tried={d0, p1}) for _ in range(4)} == {("d1", "p0")}
    assert chooser.place(tried={p0, p1}).prefill in (p0, p1)
    assert chooser.place(tried={d0, d1}).worker in (d0, d1)


def test_without_an_untried_prefill_worker_decode_serves_alone_if_allowed():
    fleet = pair_fleet(1, 2, kv_connector="nixl")
    p0 = fleet.workers[0]
    placement = Chooser(fleet).place(tried={p0})
    assert (placement.prefill, placement.reason) == (None, "fallback")
    without_fallback = Chooser(fleet, pools_of(fallback="refuse"))
    assert without_fallback.place(tried={p0}).prefill is p0
    sglang = pair_fleet(1, 1)
    assert Chooser(sglang).place(tried={sglang.workers[0]}).prefill is sglang.workers[0]


def test_without_a_prefill_worker_decode_serves_alone_if_allowed():
    fleet = fleet_of(entry("d0", role="decode", kv_connector="nixl"))
    assert Chooser(fleet).names() == ("d0", None)
    error = refusal(fleet, pools=pools_of(fallback="refuse"))
    assert (error.code, error.status) == ("no_prefill_worker", 503)
    error = refusal(fleet_of(entry("d0", role="decode")))
    assert (error.code, error.status) == ("no_prefill_worker", 503)


def test_without_a_decode_worker_only_a_regular_worker_can_serve():
    fleet = fleet_of(entry("p0", role="prefill"))
    assert refusal(fleet).code == "no_decode_worker"
    fleet.apply([entry("p0", role="prefill"), entry("r0")], NOW)
    with pytest.raises(HttpError) as caught:
        Chooser(fleet).place()
    assert caught.value.code == "none_healthy"
    fleet = fleet_of(entry("p0", role="prefill"), entry("r0"))
    assert Chooser(fleet).names() == ("r0", None)


def test_pools_are_preferred_to_regular_workers():
    fleet = fleet_of(entry("r0"), entry("p0", role="prefill"), entry("d0", role="decode"))
    chooser = Chooser(fleet)
    assert [chooser.names() for _ in range(2)] == [("d0", "p0")] * 2
    fleet.cordon(worker(fleet, "p0"), "paused")
    assert chooser.names() == ("r0", None)


@pytest.mark.parametrize(
    ("legs", "connector", "expected"),
    [
        (BOTH_ENGINES, "sglang", ("d0", "p0")),
        (SGLANG_ONLY, "sglang", ("d0", "p0")),
        (VLLM_ONLY, "nixl", ("d0", "p0")),
        (VLLM_ONLY, "sglang", "no_regular_worker"),
        (SGLANG_ONLY, "nixl", ("d0", None)),
        (DECODE_ALONE, "mooncake", ("d0", None)),
        (DECODE_ALONE, "sglang", "no_regular_worker"),
        (NO_MODEL, "sglang", ("d0", None)),
    ],
)
def test_the_engines_of_a_route_determine_its_placement(legs, connector, expected):
    fleet = pair_fleet(1, 1, kv_connector=connector)
    need = request(legs=legs)
    if isinstance(expected, str):
        assert refusal(fleet, need).code == expected
    else:
        assert Chooser(fleet).names(need) == expected


def test_a_worker_named_by_the_request_is_part_of_its_pair():
    fleet = fleet_of(entry("r0"), *[entry(f"p{n}", role="prefill") for n in range(2)],
                     *[entry(f"d{n}", role="decode") for n in range(2)])  # fmt: skip
    chooser = Chooser(fleet)

    def pairs_with(name):
        need = request(pinning=NAMED, named_worker=f"http://{name}:1")
        return {chooser.names(need) for _ in range(4)}

    assert pairs_with("d1") == {("d1", "p0"), ("d1", "p1")}
    assert pairs_with("p1") == {("d0", "p1"), ("d1", "p1")}
    assert pairs_with("r0") == {("r0", None)}
    error = refusal(fleet, request(pinning=NAMED, named_worker="http://gone:1"))
    assert (error.status, error.code) == (404, "unknown_worker")


def test_the_in_flight_limit_holds_for_both_workers_of_a_pair():
    fleet = pair_fleet(2, 2, max_inflight=1)
    p0, p1, d0, d1 = fleet.workers
    p0.in_flight = d1.in_flight = 1
    chooser = Chooser(fleet)
    assert {chooser.names() for _ in range(3)} == {("d0", "p1")}
    p1.in_flight = 1
    error = refusal(fleet)
    assert (error.code, "for prefill" in error.message) == ("all_full", True)
    assert could_take(chooser.pairing, request(), chooser.pools)
    assert not is_eligible(chooser.pairing, request(), chooser.pools)
    d0.in_flight, p1.in_flight = 1, 0
    error = refusal(fleet)
    assert (error.code, "for decode" in error.message) == ("all_full", True)


def test_a_version_constraint_holds_for_both_legs():
    fleet = pair_fleet(2, 2)
    for name in ("p1", "d1"):
        fleet.set_version(worker(fleet, name), "v2", 2)
    need = request(version_constraint=VersionConstraint("v2", 0))
    chooser = Chooser(fleet)
    assert {chooser.names(need) for _ in range(3)} == {("d1", "p1")}
    error = refusal(fleet, request(version_constraint=VersionConstraint("v3", 0)))
    assert error.code == "weight_version_unavailable"


def test_the_error_names_the_pool_whose_weights_are_being_updated():
    fleet = pair_fleet(1, 1)
    p0, d0 = fleet.workers
    fleet.cordon(p0, "updating")
    error = refusal(fleet)
    assert (error.code, "for prefill" in error.message) == ("weights_updating", True)
    assert held_for_update(fleet, request()) == [p0]
    fleet.cordon(d0, "updating")
    assert held_for_update(fleet, request()) == [d0]


def test_data_parallel_ranks_of_both_pools_are_picked():
    fleet = fleet_of(
        entry("p0", role="prefill", ranks=2, kv_connector="nixl"),
        entry("d0", role="decode", ranks=2, kv_connector="nixl"),
    )
    chooser = Chooser(fleet)
    picked = [chooser.place() for _ in range(2)]
    assert [(placement.worker.index, placement.prefill.index) for placement in picked] == [
        (0, 0),
        (1, 1),
    ]
    placement = chooser.place(request(dp_rank=1))
    assert placement.worker.index == 1
    error = refusal(fleet, request(dp_rank=7))
    assert (error.status, error.code) == (400, "invalid_rank")


@pytest.mark.parametrize("policy", ["least_request", "cache_aware"])
def test_a_decode_worker_that_has_the_prompt_cached_needs_no_prefill(policy):
    pools = pools_of(decode_policy=policy, min_uncached_tokens=16)
    chooser = Chooser(pair_fleet(1, 1, kv_connector="nixl"), pools)
    text = "x" * 400
    assert chooser.names(request(text)) == ("d0", "p0")
    placement = chooser.place(request(text + "y" * 59))
    assert (placement.prefill, placement.reason) == (None, "cached")
    assert chooser.names(request(text + "z" * 80)) == ("d0", "p0")
    assert chooser.names(request()) == ("d0", "p0")
    pools.forget_worker(worker(chooser.fleet, "d0"))
    assert chooser.names(request(text)) == ("d0", "p0")


@pytest.mark.parametrize("key", ["prompt", "input_ids"])
def test_the_prompt_beyond_the_compared_text_counts_as_not_cached(key):
    pools = pools_of(decode_policy="least_request", min_uncached_tokens=2000)
    chooser = Chooser(pair_fleet(1, 1, kv_connector="nixl"), pools)

    def request_of(size, **fields):
        value = "x" * size if key == "prompt" else [7] * (size // 2)
        body = json.dumps({key: value}, separators=(",", ":")).encode()
        return request(decoded=decode_body(body), **fields)

    per_token = 4 if key == "prompt" else 2
    assert chooser.names(request_of(LIMIT + 400 * per_token)) == ("d0", "p0")
    assert chooser.names(request_of(LIMIT + 1900 * per_token)) == ("d0", None)
    assert chooser.names(request_of(LIMIT + 2100 * per_token)) == ("d0", "p0")
    part = request_of(LIMIT + 400 * per_token, large_body_class="generation")  # partly read
    assert chooser.names(part) == ("d0", "p0")


def test_a_short_prompt_needs_no_prefill_except_on_sglang():
    pools = pools_of(min_uncached_tokens=16)
    assert Chooser(pair_fleet(1, 1, kv_connector="nixl"), pools).names(request("hi")) == (
        "d0",
        None,
    )
    assert Chooser(pair_fleet(1, 1), pools).names(request("hi")) == ("d0", "p0")


def test_no_pool_policies_are_built_for_a_fleet_without_pools():
    pools = pools_of(min_uncached_tokens=16)
    chooser = Chooser(fleet_of(entry("r0")), pools)
    assert chooser.names() == ("r0", None)
    assert pools.stats() == {}


def test_the_candidate_lists_stay_the_same_until_the_fleet_changes():
    fleet = pair_fleet(2, 2)
    pairing = Chooser(fleet).pairing
    pools = pairing.pools(request())
    assert pairing.pools(request()) is pools
    assert pools.paired is fleet.pool("decode", None, CHAT)
    first, second = (pools.partners[decode] for decode in pools.paired)
    assert first is second
    fleet.set_version(worker(fleet, "d0"), "v1", 1)
    assert [name_of(decode) for decode in pairing.pools(request()).paired] == ["d1"]


fleets = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["", "prefill", "prefill", "decode", "decode"]),
            "model": st.sampled_from([None, "m", "n"]),
            "kv_connector": st.sampled_from(["sglang", "nixl"]),
            "max_inflight": st.integers(0, 1),
            "disabled": st.sampled_from([False, False, True]),
            "in_flight": st.integers(0, 1),
            "version": st.sampled_from([(None, 0), ("v1", 1), ("v2", 2)]),
            "held": st.sampled_from(["", "", "updating"]),
        }
    ),
    max_size=6,
)
needs = st.builds(
    request,
    legs=st.sampled_from([BOTH_ENGINES, SGLANG_ONLY, VLLM_ONLY, DECODE_ALONE, NO_MODEL]),
    model=st.sampled_from([None, "m", "other"]),
    version_constraint=st.none() | st.just(VersionConstraint("v1", 0)),
    pinning=st.sampled_from([request().pinning, NAMED]),
    named_worker=st.sampled_from(["http://w0:1", "http://w1:1"]),
)


def build_fleet(rows):
    state = ("in_flight", "version", "held")  # not part of the configuration
    fleet = fleet_of(
        *(
            entry(f"w{number}", **{key: row[key] for key in row if key not in state})
            for number, row in enumerate(rows)
        )
    )
    for member, row in zip(fleet.workers, rows, strict=True):
        member.in_flight = row["in_flight"]
        fleet.set_version(member, *row["version"])
        if row["held"]:
            fleet.cordon(member, row["held"])
    return fleet


@given(fleets, needs, st.sampled_from(["decode", "refuse"]), st.data())
def test_the_picked_workers_are_those_without_ineligibility_reasons(rows, need, fallback, data):
    fleet = build_fleet(rows)
    pools = pools_of(fallback=fallback)
    tried = set(data.draw(st.lists(st.sampled_from(fleet.workers), max_size=3))) if rows else set()
    chooser = Chooser(fleet, pools)
    explained = explain_placement(fleet, need, chooser.regular, pools)
    eligible = {target for target, reasons in explained.explanation.reasons if not reasons}
    expected = explained.explanation.error
    if expected is not None:
        assert explained.explanation.pick is None
        error = refusal(fleet, need, pools)
        raised, explained_error = (
            (failure.status, failure.code, failure.message) for failure in (error, expected)
        )
        assert raised == explained_error
        if error.status == 503 and need.pinning is not NAMED:
            assert not is_eligible(chooser.pairing, need, pools)
            assert not all_tried(chooser.pairing, need, pools, tried)
        return
    placement = chooser.place(need, tried)
    assert is_eligible(chooser.pairing, need, pools)
    assert could_take(chooser.pairing, need, pools)
    prefill = placement.prefill
    assert placement.worker in eligible or tried
    if prefill is None:
        assert placement.worker.role in ("regular", "decode")
        return
    assert (placement.worker.role, prefill.role) == ("decode", "prefill")
    assert placement.worker in eligible
    assert prefill in eligible
    assert placement.worker.kv_connector == prefill.kv_connector
    assert placement.worker.model == prefill.model
    assert placement.worker.weight_version == prefill.weight_version
    for picked in (placement.worker, prefill):
        assert picked.routable
        assert not picked.max_inflight or not picked.in_flight
    if not all_tried(chooser.pairing, need, pools, tried):
        assert not tried & {placement.worker, prefill}


@given(fleets, needs, st.sampled_from([0, 100]))
def test_the_fast_path_picks_the_same_pair(rows, need, bound):
    fleet = build_fleet(rows)
    fast, full = (Chooser(fleet, pools_of(min_uncached_tokens=bound)) for _ in range(2))
    for chooser in (fast, full):
        try:
            chooser.place(need)
        except HttpError:
            return
    pair = pick_from_last_pools(fast.pairing, need, fast.pools)
    if pair is None:
        assert (
            bound or fast.pairing.cached_pools(need) is None or not fast.pairing.pools(need).paired
        )
        return
    placement = full.place(need)
    assert pair == (placement.worker, placement.prefill)
    fleet.cordon(pair[0], "updating")
    assert pick_from_last_pools(fast.pairing, need, fast.pools) is None


@given(fleets, needs, st.sampled_from(["decode", "refuse"]))
def test_an_explanation_names_the_next_pick_and_changes_nothing(rows, need, fallback):
    fleet = build_fleet(rows)
    chooser = Chooser(fleet, pools_of(fallback=fallback))
    explained = explain_placement(fleet, need, chooser.regular, chooser.pools)
    again = explain_placement(fleet, need, chooser.regular, chooser.pools)
    assert explained.explanation.pick is again.explanation.pick
    if explained.explanation.pick is not None:
        placement = chooser.place(need)
        assert placement.worker is explained.explanation.pick
        assert placement.prefill is (explained.prefill.worker if explained.prefill else None)
