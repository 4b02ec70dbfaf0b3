import json

import pytest

from tests.fleet.entries import NOW, entry, fleet_of

CONTRACT_KEYS = {
    "worker_id", "display_id", "url", "model", "capabilities", "active_requests", "health_state",
    "disabled", "routable", "consecutive_failures", "consecutive_successes", "routed_requests",
    "successful_requests", "failed_requests", "routed_requests_by_class",
    "successful_requests_by_class", "failed_requests_by_class", "last_status_code", "last_error",
    "last_checked_at",
}  # fmt: skip
OUR_KEYS = {"id", "origin", "weight", "max_inflight", "in_flight", "since", "held_by"}


@pytest.fixture
def worker():
    (only,) = fleet_of(entry("a")).workers
    return only


def test_a_record_has_the_contracts_keys_and_ours(worker):
    assert worker.record().keys() >= CONTRACT_KEYS | OUR_KEYS


def test_a_record_says_what_is_so(worker):
    worker.in_flight = 2
    worker.add_counts("generation", routed=3, succeeded=3)
    worker.add_counts("speech_http", routed=1, failed=1)
    told = json.loads(json.dumps(worker.record()))
    assert told["worker_id"] == told["id"] == "http%3A%2F%2Fa%3A1"
    assert (told["display_id"], told["url"]) == ("a:1", "http://a:1")
    assert told["capabilities"] == sorted(told["capabilities"])
    assert told["active_requests"] == told["in_flight"] == 2
    assert (told["routed_requests"], told["successful_requests"], told["failed_requests"]) == (
        4, 3, 1,
    )  # fmt: skip
    assert told["routed_requests_by_class"] == {"generation": 3, "speech_http": 1}
    assert told["last_checked_at"] == NOW.isoformat()
    assert (told["health_state"], told["last_status_code"]) == ("healthy", 200)


def test_a_worker_is_routable_while_healthy_enabled_and_held_by_nobody(worker):
    assert worker.routable
    worker.cordon_reasons.add("updating")
    assert (worker.routable, worker.record()["held_by"]) == (False, ["updating"])
    worker.cordon_reasons.clear()
    worker.configure(entry("a", disabled=True))
    assert not worker.routable


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m"},
        {"capabilities": frozenset({"chat"})},
        {"disabled": True},
        {"weight": 2},
        {"max_inflight": 3},
        {"origin": "api"},
        {"api_key_env": "KEY"},
    ],
)
def test_every_field_of_an_entry_tells_it_from_another(worker, change):
    assert worker.matches(entry("a"))
    assert not worker.matches(entry("a", **change))
    worker.configure(entry("a", **change))
    assert worker.matches(entry("a", **change))
