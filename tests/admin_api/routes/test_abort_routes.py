import json

import httpx
import pytest

from omni_proxy.admin_ops.abort import AbortFindings, AbortTarget, as_vllm_writes
from tests.admin_api.house import A, B, build_house, entry

SGLANG, VLLM = "/abort_request", "/abort_requests"


async def aborted(house, path=SGLANG, **fields):
    answer = await house.client().post(path, json=fields)
    return answer.status_code, await answer.get_json()


@pytest.fixture
def house(engines):
    house = build_house(entry(A), entry(B))
    house.healthy(A, B)
    for url in (A, B):
        engines.tell(url, SGLANG, b"")
    engines.tell(A, VLLM, {"status": "aborted", "aborted": 1})
    return house


def calls(engines, path=SGLANG):
    return [
        (f"http://127.0.0.1:{request.url.port}", json.loads(request.content))
        for request in engines.asked
        if request.url.path == path
    ]


async def test_without_knowledge_all_that_live_are_asked(house, engines):
    house.fleet.mark_dead(house.worker(A), house.worker(A).registered_at)
    house.fleet.cordon(house.worker(B), "updating")
    status, told = await aborted(house, rid="r1")
    assert (status, told["success"], told["worker_count"]) == (200, True, 1)
    assert calls(engines) == [(B, {"rid": "r1"})]
    assert house.door.aborted == [AbortTarget(("r1",))]


async def test_who_has_it_is_asked_alone(house, engines):
    house.door.found = AbortFindings(known=("r1",), running={B: ("r1",)})
    status, told = await aborted(house, rid="r1")
    assert (status, [each["worker"] for each in told["results"]]) == (200, [B])
    assert calls(engines) == [(B, {"rid": "r1"})]


async def test_a_dead_worker_that_has_it_is_asked_all_the_same(house, engines):
    house.fleet.mark_dead(house.worker(B), house.worker(B).registered_at)
    house.door.found = AbortFindings(known=("r1",), running={B: ("r1",)})
    engines.says[B, SGLANG] = httpx.ConnectError("nobody is there")
    status, told = await aborted(house, rid="r1")
    assert (status, [each["worker"] for each in told["results"]]) == (502, [B])


async def test_what_waited_here_costs_no_call(house, engines):
    house.door.found = AbortFindings(waiting=1, known=("r1",))
    status, told = await aborted(house, VLLM, request_ids=["r1"])
    assert (status, told["results"], told["aborted"], told["status"]) == (200, [], 1, "aborted")
    assert not engines.asked


async def test_the_bytes_query_and_key_of_the_caller_are_passed_on(house, engines):
    body = b'{"abort_all" :true, "abort_message": "bye"}'
    answer = await house.client().post(
        f"{SGLANG}?a=1", data=body, headers={"Authorization": "Bearer t"}
    )
    assert answer.status_code == 200
    assert {request.content for request in engines.asked} == {body}
    assert {request.url.raw_path for request in engines.asked} == {b"/abort_request?a=1"}
    assert {request.headers["authorization"] for request in engines.asked} == {"Bearer t"}


async def test_an_engine_of_the_other_kind_is_remembered(house, engines):
    engines.tell(A, SGLANG, {"detail": "Not Found"}, 404)
    for _ in range(2):
        assert (await aborted(house, rid="r1"))[0] == 200
    assert [url for url, _ in calls(engines)].count(A) == 1
    assert [each for each in calls(engines, VLLM) if each[0] == A] == [
        (A, {"request_ids": list(as_vllm_writes("r1"))})
    ] * 2


async def test_who_can_neither_is_a_failure(house, engines):
    for path in (SGLANG, VLLM):
        engines.tell(A, path, {"detail": "Not Found"}, 404)
    status, told = await aborted(house, abort_all=True)
    assert (status, told["success"], told["status"]) == (502, False, "error")
    assert {each["worker"]: each["success"] for each in told["results"]} == {A: False, B: True}


async def test_a_body_that_names_nobody_is_refused_in_the_words_of_these_routes(house, engines):
    status, told = await aborted(house)
    assert (status, told["success"], told["status"]) == (400, False, "error")
    assert not engines.asked
    assert not house.door.aborted


async def test_it_needs_the_key(engines):
    house = build_house(entry(A), key="k")
    status, told = await aborted(house, abort_all=True)
    assert (status, told["error"]["code"]) == (401, "admin_key_required")
