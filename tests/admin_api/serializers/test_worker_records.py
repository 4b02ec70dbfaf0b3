import json

import pytest

from omni_proxy.admin_api.serializers.worker_records import (
    UNUSED_CACHE_TOKENS,
    prefix_cache_record,
    worker_record,
)
from tests.fleet.entries import NOW, entry, fleet_of, heal

CONTRACT_KEYS = {
    "worker_id", "display_id", "url", "model", "capabilities", "active_requests", "health_state",
    "disabled", "routable", "consecutive_failures", "consecutive_successes", "routed_requests",
    "successful_requests", "failed_requests", "routed_requests_by_class",
    "successful_requests_by_class", "failed_requests_by_class", "last_status_code", "last_error",
    "last_checked_at",
}  # fmt: skip
OUR_KEYS = {"id", "origin", "weight", "max_inflight", "in_flight", "since", "held_by", "half_open"}


@pytest.fixture
def worker():
    (worker,) = fleet_of(entry("a")).workers
    return worker


def test_a_record_has_the_keys_of_the_api(worker):
    assert worker_record(worker).keys() >= CONTRACT_KEYS | OUR_KEYS


def test_a_record_shows_the_state_and_the_counts(worker):
    worker.in_flight = 2
    worker.add_counts("generation", routed=3, succeeded=3)
    worker.add_counts("speech_http", routed=1, failed=1)
    record = json.loads(json.dumps(worker_record(worker)))
    assert record["worker_id"] == record["id"] == "http%3A%2F%2Fa%3A1"
    assert (record["display_id"], record["url"]) == ("a:1", "http://a:1")
    assert record["capabilities"] == sorted(record["capabilities"])
    assert record["active_requests"] == record["in_flight"] == 2
    assert (record["routed_requests"], record["successful_requests"], record["failed_requests"]) == (
        4, 3, 1,
    )  # fmt: skip
    assert record["routed_requests_by_class"] == {"generation": 3, "speech_http": 1}
    assert record["last_checked_at"] == NOW.isoformat()
    assert (record["health_state"], record["last_status_code"]) == ("healthy", 200)


@pytest.mark.parametrize(
    ("counts", "noted"),
    [((UNUSED_CACHE_TOKENS, 0), True), ((UNUSED_CACHE_TOKENS - 1, 0), False), ((9999, 1), False)],
)
def test_a_record_notes_if_a_worker_always_reports_0_cached_tokens(counts, noted):
    record = prefix_cache_record(counts)
    assert (record["predicted_tokens"], record["reported_tokens"]) == counts
    assert (record["note"] is not None) is noted
    assert prefix_cache_record(None) is None


def test_a_record_has_the_reason_of_a_cordon(worker):
    worker.cordon_reasons.add("updating")
    record = worker_record(worker)
    assert (record["routable"], record["held_by"]) == (False, ["updating"])


def test_a_record_has_the_weight_version():
    fleet = fleet_of(entry("a"))
    fleet.set_version(fleet.workers[0], "v1", 1)
    assert worker_record(fleet.workers[0])["weight_version"] == "v1"


def test_the_record_of_a_half_open_worker_is_healthy_and_half_open():
    fleet = fleet_of(entry("a"))
    (worker,) = fleet.workers
    for _ in range(fleet.thresholds.fall):
        fleet.observe_request_failure(worker, status=502, error="bad", at=NOW)
    record = worker_record(worker)
    assert (record["health_state"], record["routable"], record["half_open"]) == (
        "unhealthy",
        False,
        False,
    )
    heal(fleet, worker)
    record = worker_record(worker)
    assert (record["health_state"], record["routable"], record["half_open"]) == (
        "healthy",
        True,
        True,
    )
    fleet.begin_half_open(worker)
    record = worker_record(worker)
    assert (record["health_state"], record["routable"], record["half_open"]) == (
        "healthy",
        False,
        True,
    )


def test_the_old_name_of_half_open_has_the_same_value():
    fleet = fleet_of(entry("a"))
    (worker,) = fleet.workers
    for _ in range(fleet.thresholds.fall):
        fleet.observe_request_failure(worker, status=502, error="bad", at=NOW)
    heal(fleet, worker)
    record = worker_record(worker)
    assert record["trial"] is record["half_open"] is True


def test_a_record_lists_the_data_parallel_ranks_with_their_counts(worker):
    assert worker_record(worker)["ranks"] == []
    fleet = fleet_of(entry("a", ranks=2, max_inflight=3))
    second = fleet.workers[0].dp_ranks[1]
    second.in_flight, second.peak_in_flight = 1, 2
    second.add_counts("generation", routed=4, succeeded=2, failed=1)
    record = json.loads(json.dumps(worker_record(fleet.workers[0])))
    assert record["configured_ranks"] == 2
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert record["ranks"][1] == {
        "rank": 1, "in_flight": 1, "peak_in_flight": 2, "max_inflight": 2, "routed_requests": 4,
        "successful_requests": 2, "failed_requests": 1,
    }  # fmt: skip
