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
def test_a_version_is_given_where_all_agree_and_several_are_a_409(bodies):
    reported = set()
    for each in bodies:
        stages = each.get("results") or each.get("stages") or []
        reported |= {each["weight_version"], *(s["data"]["weight_version"] for s in stages)}
    reported -= {None}
    answers = [WorkerResult(f"http://{at}", 200, each) for at, each in enumerate(bodies)]
    found = merge_model_info(answers)
    if len(reported) > 1:
        assert found.status == 409
        assert found.body["detail"]["mixed_state"] == {"weight_version": sorted(reported)}
    else:
        assert found.status == 200
        assert found.body["weight_version"] == (reported.pop() if reported else None)
        assert found.body["workers"] == found.body["results"]


def test_other_facts_that_disagree_are_null():
    answers = [
        WorkerResult("http://a", 200, {"model_path": "/a", "load_format": "auto"}),
        WorkerResult("http://b", 200, {"model_path": "/b", "load_format": "auto"}),
    ]
    found = merge_model_info(answers).body
    assert (found["model_path"], found["load_format"]) == (None, "auto")


def test_skipped_stages_report_nothing():
    reported = {"results": [
        {"data": {"weight_version": "v1", "skipped": True}},
        {"data": {"weight_version": "v2", "unsupported": True}},
        {"data": None}, "junk", {"data": {"weight_version": 3}},
    ]}  # fmt: skip
    assert label_reported(reported, "weight_version") == [3]
    assert version_of(reported) == "3"
    assert (
        version_of({"weight_version": "a", "stages": [{"data": {"weight_version": "b"}}]}) is None
    )
    assert version_of("text") is None


def test_one_failure_is_a_502_with_all_parts():
    found = merge_model_info(
        [WorkerResult("http://a", 200, {}), WorkerResult("http://b", None, "", "ReadError")]
    )
    assert found.status == 502
    assert found.body["message"] == "one or more workers failed model_info request"
    assert found.body["worker_count"] == len(found.body["workers"]) == 2
