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
    ("dialect", "fields", "meant"),
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
def test_the_body_selects_the_requests(dialect, fields, meant):
    assert target(dialect, **fields) == meant


@pytest.mark.parametrize(
    ("dialect", "body", "says"),
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
        (VLLM, b'{"request_ids": ["\\ud800"]}', "half a character"),
    ],
)
def test_a_body_without_ids_is_refused(dialect, body, says):
    with pytest.raises(HttpError, match=says) as refused:
        read_target(dialect, body)
    assert refused.value.status == 400


def test_a_list_of_ids_is_bounded():
    with pytest.raises(HttpError, match=f"{MAX_IDS} requests"):
        target(VLLM, request_ids=["a"] * (MAX_IDS + 1))


@pytest.mark.parametrize(
    ("meant", "own", "found"),
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
def test_a_request_is_meant_by_its_ids(meant, own, found):
    assert set(meant.matcher()(own)) == found


@given(st.lists(st.text(max_size=6)), st.text(max_size=6))
def test_an_id_means_the_request_of_that_id_whatever_else_is_named(others, own):
    assert own in set(AbortTarget((*others, own)).matcher()([own])) or not own


def test_only_workers_that_have_all_named_requests_are_called():
    found = AbortFindings(known=("a", "b"), running={"http://x": ("a",)})
    assert set(urls_to_call(AbortTarget(("a",)), found)) == {"http://x"}
    assert set(urls_to_call(AbortTarget(("a", "b")), found)) == {"http://x"}
    assert urls_to_call(AbortTarget(("a", "c")), found) is None
    assert urls_to_call(AbortTarget(("a",), prefix=True), found) is None
    assert urls_to_call(ALL, found) is None


def test_findings_of_several_processes_are_merged():
    one = AbortFindings(1, ("a",), {"http://x": ("a",)})
    two = AbortFindings(2, ("b",), {"http://x": ("b",), "http://y": ("b",)})
    both = merged([one, two])
    assert (both.waiting, set(both.known)) == (3, {"a", "b"})
    assert both.running == {"http://x": ("a", "b"), "http://y": ("b",)}


@pytest.mark.parametrize(
    ("dialect", "meant", "bodies"),
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
def test_the_other_engine_is_reported_in_its_own_words(dialect, meant, bodies):
    assert list(map(json.loads, call_bodies(dialect, meant, ["a1", "a2"]))) == bodies


def test_a_prefix_that_is_unknown_at_an_engine_without_prefixes_never_means_all():
    (body,) = call_bodies(VLLM, AbortTarget(("a",), prefix=True), [])
    assert json.loads(body) == {"request_ids": spelled("a")}


def test_the_reply_has_an_entry_for_each_called_worker():
    good = WorkerResult("http://x", 200, {"status": "aborted", "aborted": 2})
    silent = WorkerResult("http://y", 200, "")
    answer = abort_response(VLLM, [good, silent], sent_ids=1, waiting=4)
    assert (answer.status, answer.body["status"], answer.body["aborted"]) == (200, "aborted", 7)
    assert [entry["worker"] for entry in answer.body["results"]] == ["http://x", "http://y"]
    assert answer.body["ended_in_queue"] == 4


def test_a_worker_that_could_not_be_reached_makes_it_502():
    gone = WorkerResult("http://x", None, error="ConnectError")
    answer = abort_response(SGLANG, [gone], sent_ids=1, waiting=0)
    assert (answer.status, answer.body["success"]) == (502, False)
    assert answer.body["results"][0]["error"] == "ConnectError"


@given(st.builds(AbortTarget, st.lists(st.text()).map(tuple), st.booleans(), st.booleans()))
def test_a_target_survives_the_way_to_another_process(meant):
    sent = msgspec.msgpack.encode(meant)
    assert msgspec.msgpack.decode(sent, type=AbortTarget) == meant
