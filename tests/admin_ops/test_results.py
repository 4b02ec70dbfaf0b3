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
ANSWERS = st.builds(
    WorkerResult,
    worker=st.just("http://a"),
    status=st.none() | st.integers(200, 599),
    body=BODIES,
    error=st.sampled_from(("", "", "ReadTimeout")),
    secs=st.floats(0, 9),
)


@given(ANSWERS)
def test_a_success_is_a_whole_2xx_that_does_not_deny_itself(answer):
    naive = (
        answer.error == ""
        and answer.status is not None
        and answer.status // 100 == 2
        and not (isinstance(answer.body, dict) and answer.body.get("success") is False)
    )
    assert answer.success is naive
    assert answer.refused is (answer.error == "" and (answer.status or 0) // 100 == 4)


@given(st.lists(ANSWERS, min_size=1, max_size=4))
def test_the_whole_is_well_where_every_part_is(answers):
    found = aggregate("/x", answers, {})
    well = all(answer.success for answer in answers)
    assert (found.status, found.ok, found.body["success"]) == ((200 if well else 502), well, well)
    assert found.body["message"] == ("ok" if well else FAILED)
    assert found.body["status"] == ("ok" if well else "error")
    assert found.body["worker_count"] == len(found.body["results"]) == len(answers)


def test_an_entry_has_the_body_or_the_error_and_what_is_added_to_it():
    well = WorkerResult("http://a", 200, {"x": 1}, secs=0.5)
    lost = WorkerResult("http://b", None, "", "ConnectError", 0.1)
    reported = aggregate("/p", [well, lost], {"http://b": {"standing": "uncertain"}}).body
    assert reported["path"] == "/p"
    assert reported["results"] == [
        {"worker": "http://a", "success": True, "status_code": 200, "body": {"x": 1},
         "seconds": 0.5},
        {"worker": "http://b", "success": False, "error": "ConnectError", "seconds": 0.1,
         "standing": "uncertain"},
    ]  # fmt: skip


def test_an_answer_that_was_cut_keeps_its_status_but_no_body():
    entry = WorkerResult("http://a", 200, "", "answer of more than 9 bytes").entry()
    assert (entry["status_code"], entry["error"]) == (200, "answer of more than 9 bytes")
    assert "body" not in entry


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"detail": {"message": "m", "success": False}}, "status 400: m"),
        ({"error": {"message": "e"}}, "status 400: e"),
        ({"message": "m", "error": None}, "status 400: m"),
        ("plain\n", "status 400: plain"),
        ([1], "status 400"),
        ({"detail": "d"}, "status 400: d"),
    ],
)
def test_a_refusal_is_reported_in_the_workers_words(body, words):
    assert WorkerResult("http://a", 400, body).reason == words


def test_a_refusal_of_ours_has_the_keys_at_its_top():
    refusal = HttpError(503, "busy", "update_in_progress", holder=None)
    found = refused(refusal.with_headers(("retry-after", "1")))
    assert (found.status, found.headers) == (503, {"retry-after": "1"})
    assert found.body == {
        "success": False, "message": "busy", "status": "error", "holder": None,
        "error": {"message": "busy", "type": "server_error", "code": "update_in_progress"},
    }  # fmt: skip


@given(st.binary(max_size=20))
def test_a_body_is_json_or_text(raw):
    found = parsed(raw)
    try:
        assert json.dumps(found) == json.dumps(json.loads(raw) if raw else "")
    except ValueError:
        assert found == raw.decode("utf-8", "replace")


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
def test_a_refusal_reports_whether_anything_was_changed(status, body, unchanged):
    assert WorkerResult("http://a", status, body).unchanged is unchanged


def test_of_an_answer_with_too_many_values_the_beginning_is_shown_as_text():
    raw = b"[" + b"{}," * MAX_ANSWER_VALUES + b"{}]"
    assert parsed(raw) == raw[:MAX_TEXT_BYTES].decode()


A, B = "http://a", "http://b"


def merged(path, *bodies, status=200):
    results = [WorkerResult(url, status, body) for url, body in zip((A, B), bodies, strict=False)]
    return as_one(path, aggregate(path, results, {}), results)


def test_equal_values_are_at_the_top_level():
    reported = merged("/pause", {"status": "paused"}, {"status": "paused"})
    assert (reported.status, reported.body["status"], reported.body["success"]) == (
        200,
        "paused",
        True,
    )
    assert [each["worker"] for each in reported.body["results"]] == [A, B]


def test_different_values_are_in_the_results_only():
    reported = merged(
        "/sleep", {"status": "sleeping", "level": 1}, {"status": "sleeping", "level": 2}
    )
    assert reported.body["status"] == "sleeping"
    assert "level" not in reported.body


def test_a_worker_cannot_overwrite_our_own_keys():
    reported = merged("/pause", {"results": 1, "path": "x", "worker_count": 9, "success": True})
    assert (reported.body["path"], reported.body["worker_count"]) == ("/pause", 1)
    assert isinstance(reported.body["results"], list)


def test_what_is_long_is_in_the_results_alone():
    long = {"status": "ok", "data": list(range(100)), "nested": [[1]], "tags": ["weights"]}
    reported = merged("/wake_up", long, dict(long))
    assert reported.body["tags"] == ["weights"]
    assert not {"data", "nested"} & reported.body.keys()


def test_the_world_size_is_the_sum():
    assert merged("/get_world_size", {"world_size": 2}, {"world_size": 1}).body["world_size"] == 3


def test_the_fleet_is_paused_where_all_are():
    assert merged("/is_paused", {"is_paused": True}, {"is_paused": True}).body["is_paused"] is True
    assert (
        merged("/is_paused", {"is_paused": True}, {"is_paused": False}).body["is_paused"] is False
    )


def test_equal_checksums_are_at_the_top_and_others_a_conflict():
    one, other = {"checksums": {"tp0:w": "1"}}, {"checksums": {"tp0:w": "2"}}
    assert merged("/weight_checker", one, one).body["checksums"] == {"tp0:w": "1"}
    reported = merged("/weight_checker", one, other)
    assert (reported.status, reported.body["success"]) == (409, False)


def test_checksums_of_other_ranks_are_no_conflict():
    reported = merged(
        "/weight_checker", {"checksums": {"tp0:w": "1"}}, {"checksums": {"tp1:w": "2"}}
    )
    assert reported.status == 200
    assert "checksums" not in reported.body


def test_a_comparison_matches_where_it_does_everywhere():
    good = {"match": True, "mismatches": []}
    bad = {"match": False, "mismatches": ["w"]}
    assert merged("/weight_checker", good, good).body["match"] is True
    reported = merged("/weight_checker", good, bad)
    assert (reported.status, reported.body["match"], reported.body["mismatches"]) == (
        200,
        False,
        ["w"],
    )


def test_what_all_refuse_alike_keeps_its_status_and_its_words():
    error = {"error": {"message": "Input should be 'abort', 'wait' or 'keep'"}}
    reported = merged("/pause", error, error, status=400)
    assert reported.status == 400
    assert "Input should be" in reported.body["message"]


def test_what_breaks_is_a_bad_gateway():
    assert merged("/pause", {"error": "x"}, {"error": "x"}, status=500).status == 502
    results = [WorkerResult(A, 200, {}), WorkerResult(B, 400, {})]
    assert as_one("/pause", aggregate("/pause", results, {}), results).status == 502
