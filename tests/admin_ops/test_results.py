import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.admin_ops.results import (
    FAILED,
    MAX_ANSWER_VALUES,
    MAX_TEXT_BYTES,
    WorkerResult,
    aggregate,
    as_one,
    parsed,
    refused,
)
from omni_proxy.wire.errors import HttpError

BODIES = st.sampled_from(
    ({"success": True}, {"success": False}, {}, [], "text", None, {"success": "no"})
)
RESULTS = st.builds(
    WorkerResult,
    worker=st.just("http://a"),
    status=st.none() | st.integers(200, 599),
    body=BODIES,
    error=st.sampled_from(("", "", "ReadTimeout")),
    secs=st.floats(0, 9),
)


@given(RESULTS)
def test_success_is_a_complete_2xx_without_success_false_in_its_body(result):
    expected = (
        result.error == ""
        and result.status is not None
        and result.status // 100 == 2
        and not (isinstance(result.body, dict) and result.body.get("success") is False)
    )
    assert result.success is expected
    assert result.refused is (result.error == "" and (result.status or 0) // 100 == 4)


@given(st.lists(RESULTS, min_size=1, max_size=4))
def test_the_reply_is_ok_exactly_when_every_result_is(results):
    reply = aggregate("/x", results, {})
    all_ok = all(result.success for result in results)
    assert (reply.status, reply.ok, reply.body["success"]) == (
        (200 if all_ok else 502),
        all_ok,
        all_ok,
    )
    assert reply.body["message"] == ("ok" if all_ok else FAILED)
    assert reply.body["status"] == ("ok" if all_ok else "error")
    assert reply.body["worker_count"] == len(reply.body["results"]) == len(results)


def test_an_entry_has_the_body_or_the_error_and_the_added_fields():
    succeeded = WorkerResult("http://a", 200, {"x": 1}, secs=0.5)
    lost = WorkerResult("http://b", None, "", "ConnectError", 0.1)
    body = aggregate("/p", [succeeded, lost], {"http://b": {"standing": "uncertain"}}).body
    assert body["path"] == "/p"
    assert body["results"] == [
        {"worker": "http://a", "success": True, "status_code": 200, "body": {"x": 1},
         "seconds": 0.5},
        {"worker": "http://b", "success": False, "error": "ConnectError", "seconds": 0.1,
         "standing": "uncertain"},
    ]  # fmt: skip


def test_a_truncated_response_keeps_its_status_but_no_body():
    entry = WorkerResult("http://a", 200, "", "answer of more than 9 bytes").entry()
    assert (entry["status_code"], entry["error"]) == (200, "answer of more than 9 bytes")
    assert "body" not in entry


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"detail": {"message": "m", "success": False}}, "status 400: m"),
        ({"error": {"message": "e"}}, "status 400: e"),
        ({"message": "m", "error": None}, "status 400: m"),
        ("plain\n", "status 400: plain"),
        ([1], "status 400"),
        ({"detail": "d"}, "status 400: d"),
    ],
)
def test_the_reason_of_a_refusal_is_the_message_of_the_worker(body, reason):
    assert WorkerResult("http://a", 400, body).reason == reason


def test_a_refusal_by_the_proxy_has_its_fields_at_the_top_level():
    error = HttpError(503, "busy", "update_in_progress", holder=None)
    reply = refused(error.with_headers(("retry-after", "1")))
    assert (reply.status, reply.headers) == (503, {"retry-after": "1"})
    assert reply.body == {
        "success": False, "message": "busy", "status": "error", "holder": None,
        "error": {"message": "busy", "type": "server_error", "code": "update_in_progress"},
    }  # fmt: skip


@given(st.binary(max_size=20))
def test_a_body_is_json_or_text(raw):
    value = parsed(raw)
    try:
        assert json.dumps(value) == json.dumps(json.loads(raw) if raw else "")
    except ValueError:
        assert value == raw.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("status", "body", "unchanged"),
    [
        (400, {"success": False, "message": "Nothing was changed: the trainer is gone"}, True),
        (409, "busy", True),
        (500, {"message": "no"}, False),
        (400, {"message": "Weights were updated, but the cache was not flushed"}, False),
        (400, {"detail": {"message": "The weights are damaged: update them"}}, False),
        (400, "weights updated, cache not flushed", False),
    ],
)
def test_the_reply_of_a_worker_shows_whether_it_changed_anything(status, body, unchanged):
    assert WorkerResult("http://a", status, body).unchanged is unchanged


def test_a_body_with_too_many_values_is_cut_and_shown_as_text():
    raw = b"[" + b"{}," * MAX_ANSWER_VALUES + b"{}]"
    assert parsed(raw) == raw[:MAX_TEXT_BYTES].decode()


A, B = "http://a", "http://b"


def merged(path, *bodies, status=200):
    results = [WorkerResult(url, status, body) for url, body in zip((A, B), bodies, strict=False)]
    return as_one(path, aggregate(path, results, {}), results)


def test_equal_values_are_at_the_top_level():
    reply = merged("/pause", {"status": "paused"}, {"status": "paused"})
    assert (reply.status, reply.body["status"], reply.body["success"]) == (
        200,
        "paused",
        True,
    )
    assert [entry["worker"] for entry in reply.body["results"]] == [A, B]


def test_different_values_are_in_the_results_only():
    reply = merged("/sleep", {"status": "sleeping", "level": 1}, {"status": "sleeping", "level": 2})
    assert reply.body["status"] == "sleeping"
    assert "level" not in reply.body


def test_a_worker_cannot_overwrite_the_keys_of_the_proxy():
    reply = merged("/pause", {"results": 1, "path": "x", "worker_count": 9, "success": True})
    assert (reply.body["path"], reply.body["worker_count"]) == ("/pause", 1)
    assert isinstance(reply.body["results"], list)


def test_long_values_are_in_the_results_only():
    long = {"status": "ok", "data": list(range(100)), "nested": [[1]], "tags": ["weights"]}
    reply = merged("/wake_up", long, dict(long))
    assert reply.body["tags"] == ["weights"]
    assert not {"data", "nested"} & reply.body.keys()


def test_the_world_size_is_the_sum_over_the_workers():
    assert merged("/get_world_size", {"world_size": 2}, {"world_size": 1}).body["world_size"] == 3


def test_the_fleet_is_paused_when_all_workers_are():
    assert merged("/is_paused", {"is_paused": True}, {"is_paused": True}).body["is_paused"] is True
    assert (
        merged("/is_paused", {"is_paused": True}, {"is_paused": False}).body["is_paused"] is False
    )


def test_equal_checksums_are_at_the_top_level_and_others_are_a_409():
    one, other = {"checksums": {"tp0:w": "1"}}, {"checksums": {"tp0:w": "2"}}
    assert merged("/weight_checker", one, one).body["checksums"] == {"tp0:w": "1"}
    reply = merged("/weight_checker", one, other)
    assert (reply.status, reply.body["success"]) == (409, False)


def test_checksums_of_different_ranks_are_no_conflict():
    reply = merged("/weight_checker", {"checksums": {"tp0:w": "1"}}, {"checksums": {"tp1:w": "2"}})
    assert reply.status == 200
    assert "checksums" not in reply.body


def test_a_comparison_matches_when_it_matches_on_every_worker():
    good = {"match": True, "mismatches": []}
    bad = {"match": False, "mismatches": ["w"]}
    assert merged("/weight_checker", good, good).body["match"] is True
    reply = merged("/weight_checker", good, bad)
    assert (reply.status, reply.body["match"], reply.body["mismatches"]) == (
        200,
        False,
        ["w"],
    )


def test_an_equal_refusal_by_all_keeps_its_status_and_message():
    error = {"error": {"message": "Input should be 'abort', 'wait' or 'keep'"}}
    reply = merged("/pause", error, error, status=400)
    assert reply.status == 400
    assert "Input should be" in reply.body["message"]


def test_an_error_of_any_worker_is_a_502():
    assert merged("/pause", {"error": "x"}, {"error": "x"}, status=500).status == 502
    results = [WorkerResult(A, 200, {}), WorkerResult(B, 400, {})]
    assert as_one("/pause", aggregate("/pause", results, {}), results).status == 502
