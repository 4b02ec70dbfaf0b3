from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import CAPABILITY_BITS
from omni_proxy.routing.disaggregation.pick_record import (
    BURST,
    BURST_WORKERS,
    INTERVAL_SECS,
    MOST_CANDIDATES,
    next_record,
    record_pick,
)
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies import build_policy
from tests.fleet.entries import entry, fleet_of

CHAT = CAPABILITY_BITS["chat"]


def recorded(fleet, policy="least_request"):
    made = build_policy(RoutingConfig(policy=policy), lambda n: 0, 0.0)
    return record_pick(fleet, Requirements(CHAT), made, None, "")


def test_the_picked_one_is_first_then_who_could_take_it_then_the_others():
    fleet = fleet_of(entry("a"), entry("b"), entry("c"), entry("d", disabled=True))
    for worker, count in zip(fleet.workers, (3, 1, 2, 0), strict=True):
        worker.in_flight = count
    record = recorded(fleet)
    rows = [(each.url[7], each.in_flight, each.against) for each in record.candidates]
    assert rows == [("b", 1, ""), ("c", 2, ""), ("a", 3, ""), ("d", 0, "disabled")]
    assert (record.foreseen, record.policy) == (fleet.workers[1].url, "least_request")
    assert "in flight" in record.reason


def test_of_a_large_fleet_there_are_a_few_rows_and_records_are_rarer():
    fleet = fleet_of(*(entry(f"w{at}") for at in range(200)))
    record = recorded(fleet)
    assert (len(record.candidates), record.total) == (MOST_CANDIDATES, 200)
    assert next_record(50.0, 50.0, fleet) == 50 + INTERVAL_SECS + 1
    at_once = BURST_WORKERS // 200
    assert at_once < BURST
    assert next_record(0.0, 50.0, fleet) == 50 - (at_once - 1) * (INTERVAL_SECS + 1)


def test_records_that_follow_each_other_at_once_are_of_so_many_workers_together():
    for workers, at_once in ((1, BURST), (BURST_WORKERS // 2, 2), (BURST_WORKERS * 2, 1)):
        fleet = fleet_of(*(entry(f"w{at}") for at in range(workers)))
        due, made = 0.0, 0
        while due < 50_000 - 0.001:
            due, made = next_record(due, 50_000, fleet), made + 1
        assert made == at_once


def test_facts_are_the_numbers_that_the_policy_has_of_a_worker():
    fleet = fleet_of(entry("a"), entry("b"))
    record = recorded(fleet, policy="cache_aware")
    assert [each.facts for each in record.candidates] == [{"matched_bytes": 0}] * 2


def test_where_nobody_can_take_it_each_says_why():
    fleet = fleet_of(entry("a", disabled=True))
    record = recorded(fleet)
    assert (record.foreseen, [each.against for each in record.candidates]) == ("", ["disabled"])
