from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import CAPABILITY_BITS
from omni_proxy.routing.disaggregation.explanation import (
    BURST,
    BURST_WORKERS,
    INTERVAL_SECS,
    MAX_CANDIDATES,
    next_record,
    record_pick,
)
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies import build_policy
from tests.fleet.entries import entry, fleet_of

CHAT = CAPABILITY_BITS["chat"]


def recorded(fleet, policy="least_request"):
    built = build_policy(RoutingConfig(policy=policy), lambda n: 0, 0.0)
    return record_pick(fleet, Requirements(CHAT), built, None, "")


def test_the_picked_worker_is_first_then_the_eligible_then_the_others():
    fleet = fleet_of(entry("a"), entry("b"), entry("c"), entry("d", disabled=True))
    for worker, count in zip(fleet.workers, (3, 1, 2, 0), strict=True):
        worker.in_flight = count
    record = recorded(fleet)
    rows = [
        (candidate.url[7], candidate.in_flight, candidate.against)
        for candidate in record.candidates
    ]
    assert rows == [("b", 1, ""), ("c", 2, ""), ("a", 3, ""), ("d", 0, "disabled")]
    assert (record.foreseen, record.policy) == (fleet.workers[1].url, "least_request")
    assert "in flight" in record.reason


def test_a_large_fleet_has_shorter_and_fewer_records():
    fleet = fleet_of(*(entry(f"w{at}") for at in range(200)))
    record = recorded(fleet)
    assert (len(record.candidates), record.total) == (MAX_CANDIDATES, 200)
    assert next_record(50.0, 50.0, fleet) == 50 + INTERVAL_SECS + 1
    at_once = BURST_WORKERS // 200
    assert at_once < BURST
    assert next_record(0.0, 50.0, fleet) == 50 - (at_once - 1) * (INTERVAL_SECS + 1)


def test_a_burst_of_records_is_limited_by_the_total_number_of_workers():
    for workers, at_once in ((1, BURST), (BURST_WORKERS // 2, 2), (BURST_WORKERS * 2, 1)):
        fleet = fleet_of(*(entry(f"w{at}") for at in range(workers)))
        due, count = 0.0, 0
        while due < 50_000 - 0.001:
            due, count = next_record(due, 50_000, fleet), count + 1
        assert count == at_once


def test_the_facts_of_a_candidate_are_the_numbers_of_the_policy():
    fleet = fleet_of(entry("a"), entry("b"))
    record = recorded(fleet, policy="cache_aware")
    assert [candidate.facts for candidate in record.candidates] == [{"matched_bytes": 0}] * 2


def test_if_no_worker_is_eligible_each_candidate_has_its_reason():
    fleet = fleet_of(entry("a", disabled=True))
    record = recorded(fleet)
    assert (record.foreseen, [candidate.against for candidate in record.candidates]) == (
        "",
        ["disabled"],
    )
