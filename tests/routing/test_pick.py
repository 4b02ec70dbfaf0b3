import copy
import random
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.cordon_reasons import WEIGHT_CORDONS
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.worker import CAPABILITY_BITS, capability_mask
from omni_proxy.routing.inspect.body_fields import body_fields_of
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.pick import (
    eligible_workers,
    explain,
    ineligibility_reasons,
    no_worker_error,
    pick_worker,
    workers_held_for_update,
)
from omni_proxy.routing.policies import build_policy
from omni_proxy.routing.routes import RESPONSE_OWNER, Pinning
from omni_proxy.routing.version_constraint import VersionConstraint
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import NOW, entry, fleet_of, heal

CHAT = CAPABILITY_BITS["chat"]
SOUND = ("speech", "audio_input")


def policy():
    return build_policy(RoutingConfig(), random.randrange, 0.0)


def chosen(fleet, need, **more) -> str:
    return pick_worker(fleet, need, policy(), **more).display_id


def refusal(fleet, need, owner="") -> HttpError:
    with pytest.raises(HttpError) as caught:
        pick_worker(fleet, need, policy(), owner=owner)
    return caught.value


fleets = st.lists(
    st.fixed_dictionaries(
        {
            "model": st.sampled_from([None, "m", "n"]),
            "capabilities": st.sampled_from([("chat", *SOUND), SOUND, ("chat",)]).map(frozenset),
            "disabled": st.booleans(),
            "max_inflight": st.integers(0, 2),
            "dead": st.booleans(),
            "held": st.sets(st.sampled_from(["updating", "paused", "uncertain", "launch"])),
            "version": st.sampled_from([None, "v1", "v2"]),
            "in_flight": st.integers(0, 2),
            "role": st.sampled_from(["", "", "", "regular", "prefill", "decode"]),
        }
    ),
    max_size=4,
)
needs = st.builds(
    Requirements,
    mask=st.sets(st.sampled_from(["chat", *SOUND])).map(capability_mask),
    model=st.sampled_from([None, "m", "n", "other"]),
    # `pin_to_response_owner` replaces RESPONSE_OWNER by another one before a pick.
    pinning=st.sampled_from([pinning for pinning in Pinning if pinning is not RESPONSE_OWNER]),
    named_worker=st.sampled_from(["http://w0:1", "http://w1:1"]),
    version_constraint=st.none()
    | st.builds(VersionConstraint, st.sampled_from([None, "v1", "v3"]), st.integers(0, 2)),
)


def build_fleet(rows):
    state = ("dead", "held", "in_flight", "version")  # not part of the configuration
    fleet = fleet_of(
        *(
            entry(f"w{number}", **{key: row[key] for key in row if key not in state})
            for number, row in enumerate(rows)
        )
    )
    for worker, row in zip(fleet.workers, rows, strict=True):
        worker.in_flight = row["in_flight"]
        if row["dead"]:
            fleet.mark_dead(worker, NOW)
        for hold in row["held"]:
            fleet.cordon(worker, hold)
        fleet.set_version(worker, row["version"], len(row["version"] or ""))
    return fleet


@given(fleets, needs, st.sampled_from(["", "http://w0:1", "http://w9:1"]))
def test_workers_held_for_an_update_are_eligible_without_the_cordon(rows, need, owner):
    fleet = build_fleet(rows)
    held = workers_held_for_update(fleet, need, owner)
    routable = [w for w in fleet.workers if not ineligibility_reasons(fleet, w, need, owner)]
    assert not (held and routable)
    for worker in held:
        for hold in list(worker.cordon_reasons):
            assert hold in WEIGHT_CORDONS
            fleet.uncordon(worker, hold)
    for worker in held if any(w.health.state is Health.HEALTHY for w in held) else ():
        reasons = ineligibility_reasons(fleet, worker, need, owner)
        # What remains are reasons that do not depend on the update.
        assert all(
            reason.startswith(("full", "is not the", "serves", "names")) for reason in reasons
        )


@given(fleets, needs, st.sampled_from(["", "http://w0:1", "http://w9:1"]))
def test_a_worker_has_no_ineligibility_reason_exactly_when_it_can_be_picked(rows, need, owner):
    fleet, round_robin = build_fleet(rows), policy()
    expected = [w for w in fleet.workers if not ineligibility_reasons(fleet, w, need, owner)]
    seen = set()
    for _ in range(len(rows) * 2 + 1):
        try:
            seen.add(pick_worker(fleet, need, round_robin, owner=owner))
        except HttpError as refused:
            assert refused.status in (404, 503)  # noqa: PT017  both outcomes are valid
    assert seen == set(expected)


@given(fleets, needs)
def test_explain_picks_as_the_policy_would_without_advancing_it(rows, need):
    fleet, round_robin = build_fleet(rows), policy()
    before = copy.copy(round_robin)
    explanation = explain(fleet, need, round_robin)
    if explanation.pick is None:
        assert all(reasons for _, reasons in explanation.reasons)
        assert explanation.error.message
    else:
        assert explanation.pick is pick_worker(fleet, need, before)
        assert explanation.pick is pick_worker(fleet, need, round_robin)
        assert (explanation.pick, []) in explanation.reasons


@given(fleets, needs, st.sets(st.integers(0, 3)))
def test_a_tried_worker_is_picked_again_only_if_no_other_is_left(rows, need, tried):
    fleet = build_fleet(rows)
    tried_workers = [worker for number, worker in enumerate(fleet.workers) if number in tried]
    eligible_workers = [w for w in fleet.workers if not ineligibility_reasons(fleet, w, need)]
    if eligible_workers:
        worker = pick_worker(fleet, need, policy(), tried=tried_workers)
        assert worker in eligible_workers
        assert worker not in tried_workers or all(
            other in tried_workers for other in eligible_workers
        )


@pytest.mark.parametrize("name", get_args(get_type_hints(RoutingConfig)["policy"]))
def test_under_every_policy_a_retry_picks_another_worker(name):
    fleet = fleet_of(entry("a"), entry("b"), entry("c"))
    built = build_policy(RoutingConfig(policy=name), random.randrange, 0.0)
    need = Requirements(
        CHAT, decoded=body_fields_of({"prompt": "the same beginning " * 9}), affinity_key="k"
    )
    for spare in fleet.workers * 2:
        tried = {worker for worker in fleet.workers if worker is not spare}
        assert pick_worker(fleet, need, built, tried=tried) is spare
    assert pick_worker(fleet, need, built, tried=fleet.workers) in fleet.workers


@pytest.mark.parametrize(
    ("entries", "need", "code", "cause"),
    [
        ([], Requirements(CHAT), "no_workers", "no worker is registered"),
        (
            [entry("a", capabilities=frozenset({"speech"}))],
            Requirements(CHAT),
            "no_capable_worker",
            "no worker can do chat",
        ),
        ([entry("a", model="m")], Requirements(CHAT, "n"), "model_not_found", "no worker serves"),
        ([entry("a", disabled=True)], Requirements(CHAT), "all_disabled", "all 1 workers"),
    ],
)
def test_the_error_names_why_no_worker_is_eligible(entries, need, code, cause):
    refused = refusal(fleet_of(*entries), need)
    assert (refused.status, refused.code) == (503, code)
    assert refused.message.startswith("no eligible upstream: ")
    assert cause in refused.message
    assert ("retry-after", "1") in refused.headers


def test_the_error_names_the_health_states():
    fleet = fleet_of(entry("a"), entry("b"), healthy=False)
    fleet.mark_dead(fleet.workers[0], NOW)
    refused = refusal(fleet, Requirements(CHAT))
    assert refused.code == "none_healthy"
    assert refused.message.endswith("dead, unknown")


def test_the_error_names_the_cordon_reasons():
    fleet = fleet_of(entry("a"))
    fleet.cordon(fleet.workers[0], "launch")
    refused = refusal(fleet, Requirements(CHAT))
    assert (refused.code, refused.message.endswith("launch")) == ("all_held", True)


@pytest.mark.parametrize(
    ("holds", "code", "message"),
    [
        ([{"updating"}] * 2, "weights_updating", "is being updated"),
        ([{"paused"}] * 2, "paused", "is paused by a trainer"),
        ([{"uncertain"}] * 2, "weights_uncertain", "is uncertain since a weight update"),
        (
            [{"catching_up"}] * 2,
            "weights_uncertain",
            "is being brought up to the version of the others",
        ),
        ([{"unproven"}] * 2, "weights_uncertain", "is being queried for its weight version"),
        ([{"paused"}, {"updating"}], "weights_updating", "is being updated or paused by a trainer"),
        (
            [{"uncertain", "paused"}] * 2,
            "paused",
            "is paused by a trainer or uncertain since a weight update",
        ),
        ([{"updating", "launch"}, {"updating"}], "all_held", "is held: launch, updating"),
    ],
)
def test_the_error_names_the_weight_operation(holds, code, message):
    fleet = fleet_of(entry("a"), entry("b"))
    for worker, reasons in zip(fleet.workers, holds, strict=True):
        for reason in reasons:
            fleet.cordon(worker, reason)
    refused = refusal(fleet, Requirements(CHAT))
    assert (refused.code, refused.headers) == (code, (("retry-after", "1"),))
    assert refused.message == f"no eligible upstream: every worker that could take it {message}"


def test_ineligible_workers_do_not_hide_that_others_are_being_updated():
    fleet = fleet_of(
        entry("a"), entry("b"), entry("c", disabled=True), entry("d", capabilities=frozenset(SOUND))
    )
    fleet.mark_dead(fleet.workers[1], NOW)
    fleet.cordon(fleet.workers[0], "updating")
    assert refusal(fleet, Requirements(CHAT)).code == "weights_updating"
    heal(fleet, fleet.workers[1])
    fleet.revive(fleet.workers[1], NOW)
    heal(fleet, fleet.workers[1])
    assert chosen(fleet, Requirements(CHAT)) == "b:1"


def test_an_update_of_the_only_possible_worker_is_the_error():
    fleet = fleet_of(entry("a"), entry("b"))
    fleet.cordon(fleet.workers[0], "updating")
    voices = Requirements(CAPABILITY_BITS["speech"], pinning=Pinning.VOICE_OWNER)
    assert refusal(fleet, voices, owner="http://a:1").code == "weights_updating"
    named = Requirements(
        CAPABILITY_BITS["speech"], pinning=Pinning.NAMED, named_worker="http://a:1"
    )
    assert refusal(fleet, named).code == "weights_updating"


def test_only_workers_with_the_required_weights_are_picked():
    fleet = fleet_of(entry("a"), entry("b"))
    a, b = fleet.workers
    need = Requirements(CHAT, version_constraint=VersionConstraint("v2"))
    refused = refusal(fleet, need)
    assert (refused.status, refused.code) == (503, "weight_version_unavailable")
    assert refused.message.endswith("no worker that could take it has weights 'v2'")
    fleet.set_version(a, "v1", 1)
    fleet.set_version(b, "v2", 2)
    assert {chosen(fleet, need) for _ in range(3)} == {"b:1"}
    assert list(
        eligible_workers(fleet, Requirements(CHAT, version_constraint=VersionConstraint(None, 1)))
    ) == [a, b]
    assert ineligibility_reasons(fleet, a, need) == ["has weights 'v1' (epoch 1), not 'v2'"]
    fleet.cordon(b, "updating")
    assert refusal(fleet, need).code == "weights_updating"


def test_without_capacity_the_error_is_all_full():
    fleet = fleet_of(entry("a", max_inflight=1))
    fleet.workers[0].in_flight = 1
    assert refusal(fleet, Requirements(CHAT)).code == "all_full"


def test_a_full_model_is_all_full_despite_a_worker_without_a_model_name():
    fleet = fleet_of(entry("a"), entry("b", model="m", max_inflight=1))
    fleet.workers[1].in_flight = 1
    assert refusal(fleet, Requirements(CHAT, "m")).code == "all_full"


def test_a_model_of_a_disabled_worker_is_not_reported_as_unknown():
    fleet = fleet_of(entry("a", model="m"), entry("b", model="n", disabled=True))
    assert refusal(fleet, Requirements(CHAT, "n")).code == "all_disabled"


def test_workers_without_a_model_name_are_skipped_if_any_worker_has_one():
    fleet = fleet_of(entry("a"), entry("b", model="m"))
    assert chosen(fleet, Requirements(CHAT, "m")) == "b:1"
    assert refusal(fleet, Requirements(CHAT, "other")).status == 503
    nameless = fleet_of(entry("a"))
    assert chosen(nameless, Requirements(CHAT, "anything")) == "a:1"


def test_voices_go_to_their_owner_or_to_the_first_capable_worker():
    fleet = fleet_of(
        entry("a", capabilities=frozenset({"speech"})),
        entry("b", capabilities=frozenset(SOUND)),
        entry("c", capabilities=frozenset(SOUND)),
    )
    need = Requirements(CAPABILITY_BITS["speech"], pinning=Pinning.VOICE_OWNER)
    assert chosen(fleet, need) == "b:1"
    reasons_of_all = [ineligibility_reasons(fleet, worker, need) for worker in fleet.workers]
    assert [bool(reasons) for reasons in reasons_of_all] == [True, False, True]
    assert chosen(fleet, need, owner="http://c:1") == "c:1"
    fleet.mark_dead(fleet.workers[2], NOW)
    refused = refusal(fleet, need, owner="http://c:1")
    assert (refused.code, "http://c:1" in refused.message) == ("voice_owner_unavailable", True)


def test_only_a_named_worker_may_serve_the_request():
    fleet = fleet_of(entry("a"), entry("b"))
    need = Requirements(
        CAPABILITY_BITS["speech"], pinning=Pinning.NAMED, named_worker=fleet.workers[1].id
    )
    assert {chosen(fleet, need) for _ in range(3)} == {"b:1"}
    fleet.mark_dead(fleet.workers[1], NOW)
    assert refusal(fleet, need).code == "worker_unavailable"
    need.named_worker = "http://nobody:1"
    assert refusal(fleet, need).status == 404


def test_reasons_are_ordered_by_importance():
    fleet = fleet_of(entry("a", model="m", disabled=True, max_inflight=1), healthy=False)
    (worker,) = fleet.workers
    worker.in_flight = 1
    fleet.cordon(worker, "updating")
    assert ineligibility_reasons(fleet, worker, Requirements(CHAT)) == [
        "disabled",
        "not checked yet",
        "held: updating",
        "full: 1 of 1 in flight",
    ]


def test_an_error_names_a_missing_capability_before_a_disabled_worker():
    fleet = fleet_of(entry("a", capabilities=frozenset({"speech"}), disabled=True))
    assert no_worker_error(fleet, Requirements(CHAT)).code == "no_capable_worker"


def test_during_a_half_open_request_the_worker_is_not_picked():
    fleet = fleet_of(entry("a"))
    (worker,) = fleet.workers
    for _ in range(fleet.thresholds.fall):
        fleet.observe_request_failure(worker, status=502, error="bad", at=NOW)
    heal(fleet, worker)
    assert chosen(fleet, Requirements(CHAT)) == "a:1"
    fleet.begin_half_open(worker)
    assert ineligibility_reasons(fleet, worker, Requirements(CHAT)) == [
        "half-open: one request at a time until one succeeds"
    ]
    refused = refusal(fleet, Requirements(CHAT))
    assert (refused.code, refused.message.endswith("healthy: half-open")) == ("none_healthy", True)
    [(_, reasons)] = explain(fleet, Requirements(CHAT), policy()).reasons
    assert reasons[0].startswith("half-open")


def test_an_error_for_a_request_without_a_model_names_no_model():
    fleet = fleet_of(entry("a"))
    error = no_worker_error(fleet, Requirements(mask=CHAT))
    assert (error.code, "None" in error.message) == ("all_full", False)
    (reason,) = ineligibility_reasons(
        mixed := fleet_of(entry("a"), entry("b", model="m")),
        mixed.workers[0],
        Requirements(CHAT, "m"),
    )
    assert reason == "names no model, not 'm'"


def test_a_regular_request_never_gets_a_prefill_or_decode_worker():
    fleet = fleet_of(entry("p", role="prefill"), entry("d", role="decode"))
    error = refusal(fleet, Requirements(mask=CHAT))
    assert (error.status, error.code) == (503, "no_regular_worker")
    for worker in fleet.workers:
        assert ineligibility_reasons(fleet, worker, Requirements(mask=CHAT)) == [
            f"serves only the {worker.role} leg of requests"
        ]
    fleet = fleet_of(entry("p", role="prefill"), entry("a"))
    assert chosen(fleet, Requirements(mask=CHAT)) == "a:1"
