import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.protocol.checksum_agreement import Digest, compare_answers, parse_digest


def omni(ranks=(), whole="", stage="text"):
    """The response of a replica with a checksum for each of its ranks."""
    data = {"action": "checksum", "full_checksum": whole or None}
    if len(ranks) == 1:
        data["per_gpu_checksum"] = ranks[0]
    elif ranks:
        data["rank_results"] = [
            {"rank": at, "data": {"per_gpu_checksum": checksum}}
            for at, checksum in enumerate(ranks)
        ]
    skipped = {"stage": "prepare", "data": {"skipped": True}}
    return {"success": True, "results": [{"stage": stage, "data": data}, skipped]}


def sglang(*ranks):
    return {"success": True, "ranks": [{"per_gpu_checksum": checksum} for checksum in ranks]}


def verdict(**bodies):
    return compare_answers({
        url: WorkerResult(url, 200, body) if isinstance(body, dict) else body
        for url, body in bodies.items()
    })  # fmt: skip


def test_equal_layouts_are_compared_rank_by_rank():
    compared = verdict(a=omni(("x", "y"), "1"), b=omni(("x", "y"), "2"), c=omni(("y", "x"), "1"))
    assert (compared.checked, compared.mismatched) == (("a", "b"), ("c",))


def test_different_layouts_are_compared_over_whole_tensors():
    compared = verdict(a=omni(("x", "y"), "w"), b=omni(("z",), "w"))
    assert (compared.checked, compared.mismatched) == (("a", "b"), ())
    compared = verdict(a=omni(("x", "y"), "w"), b=omni(("z",), "v"), c=omni(("q",), "w"))
    assert (compared.checked, compared.mismatched) == (("a", "c"), ("b",))


def test_two_workers_that_differ_are_both_mismatched():
    compared = verdict(a=omni(("x",)), b=omni(("y",)))
    assert (compared.checked, compared.mismatched) == ((), ("a", "b"))


def test_a_worker_that_cannot_be_compared_is_unverified():
    lost = WorkerResult("d", None, "", "ReadTimeout")
    compared = verdict(a=omni(("x",)), b=omni(("x",)), c=sglang("q"), d=lost, e={"success": True},
                    f=omni(("x", "y")))  # fmt: skip
    assert (compared.checked, compared.mismatched) == (("a", "b"), ())
    assert compared.unverified == {
        "c": "no other worker's checksum can be compared with it",
        "d": "its checker failed: ReadTimeout",
        "e": "its checker reports no checksum",
        "f": "no other worker's checksum can be compared with it",
    }
    assert compared.to_dict()["unverified"] == ["d", "e", "c", "f"]


def test_workers_with_the_same_engine_are_compared():
    assert verdict(a=sglang("q", "r"), b=sglang("q", "r")).checked == ("a", "b")
    assert verdict(a=sglang("q"), b=sglang("r")).mismatched == ("a", "b")


def test_a_single_worker_with_a_checksum_counts_as_checked():
    compared = verdict(a=omni(("x",), "w"))
    assert (compared.checked, compared.checksums) == (("a",), {"a": "w"})
    assert verdict(a=omni(("x",)), b={"success": True}).checked == ()


@pytest.mark.parametrize(
    "junk",
    [{}, {"results": 3}, {"results": [{"data": {"per_gpu_checksum": 7}}]}, {"ranks": [{}]}, "text",
     {"results": [{"data": {"rank_results": [{"data": None}]}}]}],
)  # fmt: skip
def test_invalid_reports_have_no_digest(junk):
    assert parse_digest(WorkerResult("a", 200, junk)) == "its checker reports no checksum"


def test_only_checksums_that_all_stages_report_are_used():
    body = {"results": [
        {"stage": "b", "data": {"per_gpu_checksum": "x", "full_checksum": "2"}},
        {"stage": "a", "data": {"full_checksum": "1"}},
    ]}  # fmt: skip
    assert parse_digest(WorkerResult("a", 200, body)) == Digest("omni", (), "1/2")


def test_a_rank_without_a_checksum_leaves_only_the_full_checksum():
    body = omni(("x", None), "w")
    assert parse_digest(WorkerResult("a", 200, body)) == Digest("omni", (), "w")


SUMS = st.sampled_from(("x", "y", "z"))


@given(st.dictionaries(st.sampled_from("abcdef"), SUMS, min_size=2))
def test_the_largest_group_of_equal_replicas_is_checked(sums):
    compared = verdict(**{url: omni((checksum,)) for url, checksum in sums.items()})
    sizes = sorted((list(sums.values()).count(s) for s in set(sums.values())), reverse=True)
    has_majority = len(sizes) == 1 or sizes[0] > sizes[1]
    if has_majority:
        best = max(set(sums.values()), key=list(sums.values()).count)
        assert set(compared.checked) == {url for url, checksum in sums.items() if checksum == best}
    else:
        largest = {s for s in sums.values() if list(sums.values()).count(s) == sizes[0]}
        assert not {url for url in compared.checked if sums[url] in largest}
    assert {*compared.checked, *compared.mismatched} == sums.keys()
