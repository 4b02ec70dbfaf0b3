import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.admin_ops.abort_requests import (
    MAX_IDS,
    AbortDialect,
    AbortFindings,
    AbortTarget,
    abort_response,
    call_bodies,
    merged,
    read_target,
    urls_to_call,
)
from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.wire.errors import HttpError

SGLANG, VLLM = AbortDialect.SGLANG, AbortDialect.VLLM
ALL = AbortTarget(everything=True)


def spelled(name):
    return [name, f"chatcmpl-{name}", f"cmpl-{name}-0", f"generate-tokens-{name}"]


def target(dialect, **fields):
    return read_target(dialect, json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("dialect", "fields", "expected"),
    [
        (SGLANG, {"rid": "a"}, AbortTarget(("a",))),
        (SGLANG, {"rid": ["a", "b"]}, AbortTarget(("a", "b"))),
        (SGLANG, {"rid": "a", "abort_all": False}, AbortTarget(("a",))),
        (SGLANG, {"rid": "a::", "prefix": True}, AbortTarget(("a::",), prefix=True)),
        (SGLANG, {"abort_all": True}, ALL),
        (SGLANG, {"rid": "", "abort_all": True}, ALL),
        (VLLM, {"request_ids": ["a", "b"]}, AbortTarget(("a", "b"))),
        (VLLM, {"request_ids": "a"}, AbortTarget(("a",))),
        (VLLM, {}, ALL),
        (VLLM, {"request_ids": None}, ALL),
        (VLLM, {"request_ids": []}, ALL),
    ],
)
def test_the_body_selects_the_requests(dialect, fields, expected):
    assert target(dialect, **fields) == expected


@pytest.mark.parametrize(
    ("dialect", "body", "message"),
    [
        (SGLANG, b"", "invalid JSON"),
        (VLLM, b"", "invalid JSON"),
        (SGLANG, b"[]", "must be a JSON object"),
        (SGLANG, b"{}", "abort_all"),
        (SGLANG, b'{"rid": ""}', "name a request"),
        (SGLANG, b'{"rid": 7}', "rid must be a string"),
        (SGLANG, b'{"rid": "a", "prefix": 1}', "prefix must be true or false"),
        (SGLANG, b'{"abort_all": "yes"}', "abort_all must be true or false"),
        (VLLM, b'{"request_ids": [1]}', "request_ids must be a string or a list"),
        (VLLM, b'{"request_ids": ["\\ud800"]}', "a lone surrogate"),
    ],
)
def test_a_body_that_selects_no_requests_is_refused(dialect, body, message):
    with pytest.raises(HttpError, match=message) as refused:
        read_target(dialect, body)
    assert refused.value.status == 400


def test_a_list_of_ids_is_bounded():
    with pytest.raises(HttpError, match=f"{MAX_IDS} requests"):
        target(VLLM, request_ids=["a"] * (MAX_IDS + 1))


@pytest.mark.parametrize(
    ("selection", "own_ids", "matched"),
    [
        (AbortTarget(("a", "b")), ["b"], {"b"}),
        (AbortTarget(("a",)), ["ab"], set()),
        (AbortTarget(("a-1",)), ["a"], set()),
        (AbortTarget(("chatcmpl-a",)), ["a"], {"chatcmpl-a"}),
        (AbortTarget(("cmpl-a",)), ["cmpl-a"], {"cmpl-a"}),
        (AbortTarget(("cmpl-a-b-1",)), ["a-b"], {"cmpl-a-b-1"}),
        (AbortTarget(("cmpl-a-b",)), ["a"], set()),
        (AbortTarget(("a",), prefix=True), ["ab"], {"a"}),
        (AbortTarget(("ab",), prefix=True), ["a"], set()),
        (ALL, [], {""}),
    ],
)
def test_a_target_matches_a_request_by_any_of_its_ids(selection, own_ids, matched):
    assert set(selection.matcher()(own_ids)) == matched


@given(st.lists(st.text(max_size=6)), st.text(max_size=6))
def test_an_id_selects_its_request_whatever_other_ids_are_listed(others, own):
    assert own in set(AbortTarget((*others, own)).matcher()([own])) or not own


def test_only_workers_that_run_the_listed_requests_are_called():
    findings = AbortFindings(known=("a", "b"), running={"http://x": ("a",)})
    assert set(urls_to_call(AbortTarget(("a",)), findings)) == {"http://x"}
    assert set(urls_to_call(AbortTarget(("a", "b")), findings)) == {"http://x"}
    assert urls_to_call(AbortTarget(("a", "c")), findings) is None
    assert urls_to_call(AbortTarget(("a",), prefix=True), findings) is None
    assert urls_to_call(ALL, findings) is None


def test_findings_of_several_processes_are_merged():
    first = AbortFindings(1, ("a",), {"http://x": ("a",)})
    second = AbortFindings(2, ("b",), {"http://x": ("b",), "http://y": ("b",)})
    both = merged([first, second])
    assert (both.waiting, set(both.known)) == (3, {"a", "b"})
    assert both.running == {"http://x": ("a", "b"), "http://y": ("b",)}


@pytest.mark.parametrize(
    ("dialect", "selection", "bodies"),
    [
        (VLLM, ALL, [{}]),
        (VLLM, AbortTarget(("a", "b")), [{"request_ids": [*spelled("a"), *spelled("b")]}]),
        (
            VLLM,
            AbortTarget(("a",), prefix=True),
            [{"request_ids": [*spelled("a1"), *spelled("a2")]}],
        ),
        (SGLANG, ALL, [{"abort_all": True}]),
        (SGLANG, AbortTarget(("a", "b")), [{"rid": "a"}, {"rid": "b"}]),
        (SGLANG, AbortTarget(("a",), prefix=True), [{"rid": "a", "prefix": True}]),
    ],
)
def test_the_target_is_translated_for_each_engine(dialect, selection, bodies):
    assert list(map(json.loads, call_bodies(dialect, selection, ["a1", "a2"]))) == bodies


def test_an_unmatched_prefix_never_selects_all_requests_of_vllm():
    (body,) = call_bodies(VLLM, AbortTarget(("a",), prefix=True), [])
    assert json.loads(body) == {"request_ids": spelled("a")}


def test_the_reply_has_an_entry_for_each_called_worker():
    good = WorkerResult("http://x", 200, {"status": "aborted", "aborted": 2})
    silent = WorkerResult("http://y", 200, "")
    response = abort_response(VLLM, [good, silent], sent_ids=1, waiting=4)
    assert (response.status, response.body["status"], response.body["aborted"]) == (
        200,
        "aborted",
        7,
    )
    assert [entry["worker"] for entry in response.body["results"]] == ["http://x", "http://y"]
    assert response.body["ended_in_queue"] == 4


def test_an_unreachable_worker_makes_the_reply_502():
    unreachable = WorkerResult("http://x", None, error="ConnectError")
    response = abort_response(SGLANG, [unreachable], sent_ids=1, waiting=0)
    assert (response.status, response.body["success"]) == (502, False)
    assert response.body["results"][0]["error"] == "ConnectError"


@given(st.builds(AbortTarget, st.lists(st.text()).map(tuple), st.booleans(), st.booleans()))
def test_a_target_is_sent_to_another_process_unchanged(selection):
    encoded = msgspec.msgpack.encode(selection)
    assert msgspec.msgpack.decode(encoded, type=AbortTarget) == selection
