from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.admin_ops.results import WorkerResult, label_reported, merge_model_info, version_of

LABELS = st.sampled_from((None, "v1", "v2"))


def body(top, stages, place="results"):
    return {
        "success": True,
        "weight_version": top,
        place: [{"stage": str(at), "data": {"weight_version": v}} for at, v in enumerate(stages)],
    }


BODIES = st.builds(
    body, LABELS, st.lists(LABELS, max_size=2), st.sampled_from(("results", "stages"))
)


@given(st.lists(BODIES, min_size=1, max_size=4))
def test_an_agreed_version_is_shown_and_several_versions_are_a_409(bodies):
    versions = set()
    for worker_body in bodies:
        stages = worker_body.get("results") or worker_body.get("stages") or []
        versions |= {worker_body["weight_version"], *(s["data"]["weight_version"] for s in stages)}
    versions -= {None}
    results = [WorkerResult(f"http://{n}", 200, content) for n, content in enumerate(bodies)]
    reply = merge_model_info(results)
    if len(versions) > 1:
        assert reply.status == 409
        assert reply.body["detail"]["mixed_state"] == {"weight_version": sorted(versions)}
    else:
        assert reply.status == 200
        assert reply.body["weight_version"] == (versions.pop() if versions else None)
        assert reply.body["workers"] == reply.body["results"]


def test_other_fields_that_differ_are_null():
    results = [
        WorkerResult("http://a", 200, {"model_path": "/a", "load_format": "auto"}),
        WorkerResult("http://b", 200, {"model_path": "/b", "load_format": "auto"}),
    ]
    body = merge_model_info(results).body
    assert (body["model_path"], body["load_format"]) == (None, "auto")


def test_versions_of_skipped_stages_are_ignored():
    body = {"results": [
        {"data": {"weight_version": "v1", "skipped": True}},
        {"data": {"weight_version": "v2", "unsupported": True}},
        {"data": None}, "junk", {"data": {"weight_version": 3}},
    ]}  # fmt: skip
    assert label_reported(body, "weight_version") == [3]
    assert version_of(body) == "3"
    assert (
        version_of({"weight_version": "a", "stages": [{"data": {"weight_version": "b"}}]}) is None
    )
    assert version_of("text") is None


def test_one_failed_worker_makes_a_502_that_lists_all_workers():
    reply = merge_model_info(
        [WorkerResult("http://a", 200, {}), WorkerResult("http://b", None, "", "ReadError")]
    )
    assert reply.status == 502
    assert reply.body["message"] == "one or more workers failed model_info request"
    assert reply.body["worker_count"] == len(reply.body["workers"]) == 2
