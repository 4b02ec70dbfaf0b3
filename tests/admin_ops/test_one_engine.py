from omni_proxy.admin_ops.one_engine import as_one
from omni_proxy.admin_ops.results import WorkerResult, aggregate

A, B = "http://a", "http://b"


def merged(path, *bodies, status=200):
    results = [WorkerResult(url, status, body) for url, body in zip((A, B), bodies, strict=False)]
    return as_one(path, aggregate(path, results, {}), results)


def test_what_all_say_alike_is_at_the_top():
    told = merged("/pause", {"status": "paused"}, {"status": "paused"})
    assert (told.status, told.body["status"], told.body["success"]) == (200, "paused", True)
    assert [each["worker"] for each in told.body["results"]] == [A, B]


def test_what_they_say_differently_is_in_the_results_alone():
    told = merged("/sleep", {"status": "sleeping", "level": 1}, {"status": "sleeping", "level": 2})
    assert told.body["status"] == "sleeping"
    assert "level" not in told.body


def test_a_worker_cannot_overwrite_our_own_keys():
    told = merged("/pause", {"results": 1, "path": "x", "worker_count": 9, "success": True})
    assert (told.body["path"], told.body["worker_count"]) == ("/pause", 1)
    assert isinstance(told.body["results"], list)


def test_what_is_long_is_in_the_results_alone():
    long = {"status": "ok", "data": list(range(100)), "nested": [[1]], "tags": ["weights"]}
    told = merged("/wake_up", long, dict(long))
    assert told.body["tags"] == ["weights"]
    assert not {"data", "nested"} & told.body.keys()


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
    told = merged("/weight_checker", one, other)
    assert (told.status, told.body["success"]) == (409, False)


def test_checksums_of_other_ranks_are_no_conflict():
    told = merged("/weight_checker", {"checksums": {"tp0:w": "1"}}, {"checksums": {"tp1:w": "2"}})
    assert told.status == 200
    assert "checksums" not in told.body


def test_a_comparison_matches_where_it_does_everywhere():
    good = {"match": True, "mismatches": []}
    bad = {"match": False, "mismatches": ["w"]}
    assert merged("/weight_checker", good, good).body["match"] is True
    told = merged("/weight_checker", good, bad)
    assert (told.status, told.body["match"], told.body["mismatches"]) == (200, False, ["w"])


def test_what_all_refuse_alike_keeps_its_status_and_its_words():
    error = {"error": {"message": "Input should be 'abort', 'wait' or 'keep'"}}
    told = merged("/pause", error, error, status=400)
    assert told.status == 400
    assert "Input should be" in told.body["message"]


def test_what_breaks_is_a_bad_gateway():
    assert merged("/pause", {"error": "x"}, {"error": "x"}, status=500).status == 502
    results = [WorkerResult(A, 200, {}), WorkerResult(B, 400, {})]
    assert as_one("/pause", aggregate("/pause", results, {}), results).status == 502
