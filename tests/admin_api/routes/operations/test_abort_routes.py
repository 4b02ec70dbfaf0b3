import json

import httpx
import pytest

from omni_proxy.admin_ops.abort_requests import AbortFindings, AbortTarget, as_vllm_writes
from tests.admin_api.api_fixture import A, B, build_api, entry

SGLANG, VLLM = "/abort_request", "/abort_requests"


async def call_abort(api, path=SGLANG, **fields):
    response = await api.client().post(path, json=fields)
    return response.status_code, await response.get_json()


@pytest.fixture
def api(engines):
    api = build_api(entry(A), entry(B))
    api.healthy(A, B)
    for url in (A, B):
        engines.set_reply(url, SGLANG, b"")
    engines.set_reply(A, VLLM, {"status": "aborted", "aborted": 1})
    return api


def calls(engines, path=SGLANG):
    return [
        (f"http://127.0.0.1:{request.url.port}", json.loads(request.content))
        for request in engines.requests
        if request.url.path == path
    ]


async def test_an_unknown_request_is_aborted_at_all_live_workers(api, engines):
    api.fleet.mark_dead(api.worker(A), api.worker(A).registered_at)
    api.fleet.cordon(api.worker(B), "updating")
    status, body = await call_abort(api, rid="r1")
    assert (status, body["success"], body["worker_count"]) == (200, True, 1)
    assert calls(engines) == [(B, {"rid": "r1"})]
    assert api.data_plane.aborted == [AbortTarget(("r1",))]


async def test_only_the_worker_with_the_request_is_called(api, engines):
    api.data_plane.found = AbortFindings(known=("r1",), running={B: ("r1",)})
    status, body = await call_abort(api, rid="r1")
    assert (status, [result["worker"] for result in body["results"]]) == (200, [B])
    assert calls(engines) == [(B, {"rid": "r1"})]


async def test_a_dead_worker_with_the_request_is_called_too(api, engines):
    api.fleet.mark_dead(api.worker(B), api.worker(B).registered_at)
    api.data_plane.found = AbortFindings(known=("r1",), running={B: ("r1",)})
    engines.replies[B, SGLANG] = httpx.ConnectError("connection refused")
    status, body = await call_abort(api, rid="r1")
    assert (status, [result["worker"] for result in body["results"]]) == (502, [B])


async def test_a_request_in_the_admission_queue_is_aborted_without_a_call(api, engines):
    api.data_plane.found = AbortFindings(waiting=1, known=("r1",))
    status, body = await call_abort(api, VLLM, request_ids=["r1"])
    assert (status, body["results"], body["aborted"], body["status"]) == (200, [], 1, "aborted")
    assert not engines.requests


async def test_the_bytes_query_and_key_of_the_caller_are_passed_on(api, engines):
    body = b'{"abort_all" :true, "abort_message": "bye"}'
    response = await api.client().post(
        f"{SGLANG}?a=1", data=body, headers={"Authorization": "Bearer t"}
    )
    assert response.status_code == 200
    assert {request.content for request in engines.requests} == {body}
    assert {request.url.raw_path for request in engines.requests} == {b"/abort_request?a=1"}
    assert {request.headers["authorization"] for request in engines.requests} == {"Bearer t"}


async def test_the_abort_route_of_an_engine_is_remembered(api, engines):
    engines.set_reply(A, SGLANG, {"detail": "Not Found"}, 404)
    for _ in range(2):
        assert (await call_abort(api, rid="r1"))[0] == 200
    assert [url for url, _ in calls(engines)].count(A) == 1
    assert [call for call in calls(engines, VLLM) if call[0] == A] == [
        (A, {"request_ids": list(as_vllm_writes("r1"))})
    ] * 2


async def test_a_worker_without_either_route_is_a_failure(api, engines):
    for path in (SGLANG, VLLM):
        engines.set_reply(A, path, {"detail": "Not Found"}, 404)
    status, body = await call_abort(api, abort_all=True)
    assert (status, body["success"], body["status"]) == (502, False, "error")
    assert {row["worker"]: row["success"] for row in body["results"]} == {A: False, B: True}


async def test_an_abort_without_ids_is_refused(api, engines):
    status, body = await call_abort(api)
    assert (status, body["success"], body["status"]) == (400, False, "error")
    assert not engines.requests
    assert not api.data_plane.aborted


async def test_an_abort_needs_the_key(engines):
    api = build_api(entry(A), key="k")
    status, body = await call_abort(api, abort_all=True)
    assert (status, body["error"]["code"]) == (401, "admin_key_required")
