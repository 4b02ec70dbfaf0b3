"""Routes of workers as clients of other routers use them: their fields, codes, ids, 202 and jobs."""

from urllib.parse import quote
from uuid import UUID

import pytest

from omni_proxy.config.schema import HealthConfig
from tests.admin_api.api_fixture import ID_A, NOW, A, B, C, build_api, call, entry, message


async def test_a_record_speaks_both_dialects(api):
    api.healthy(A)
    _, body, _ = await call(api, "GET", f"/workers/{ID_A}")
    assert (body["health_state"], body["routable"]) == ("healthy", True)
    assert (body["is_healthy"], body["status"], body["worker_type"]) == (True, "ready", "regular")
    assert (body["priority"], body["cost"], body["labels"]) == (50, 1.0, {})


async def test_smgs_dialect_is_accepted_at_once(api):
    status, body, headers = await call(
        api,
        "POST",
        "/workers",
        {"url": C, "priority": 9, "labels": {"zone": "a"}, "api_key": "k"},
    )
    assert (status, body["status"], body["worker_id"]) == (202, "accepted", quote(C, safe=""))
    assert headers["Location"] == body["location"] == f"/workers/{quote(C, safe='')}"
    assert body["ignored"] == ["api_key"]
    assert api.prober.probed == []
    _, record, _ = await call(api, "GET", headers["Location"])
    assert (record["priority"], record["labels"]) == (9, {"zone": "a"})


async def test_a_client_may_prefer_not_to_wait(api):
    headers = {"Prefer": "wait=1, respond-async"}
    assert (await call(api, "POST", "/workers", {"url": C}, **headers))[0] == 202
    status, _, answered = await call(api, "PUT", f"/workers/{C}", {"disabled": True}, **headers)
    assert (status, answered["Location"]) == (202, f"/workers/{quote(C, safe='')}")
    assert api.worker(C).disabled


async def test_every_answer_names_the_worker_at_the_top(api):
    named = {"worker_id": ID_A, "url": A, "location": f"/workers/{ID_A}"}
    await call(api, "DELETE", f"/workers/{A}")
    for method, path, body in (
        ("POST", "/workers", {"url": A}),
        ("PUT", f"/workers/{ID_A}", {"disabled": False}),
        ("PUT", f"/workers/{ID_A}", {"url": A}),
        ("PATCH", f"/workers/{ID_A}", {"cost": 1}),
    ):
        status, reported, _ = await call(api, method, path, body)
        assert (status, {key: reported[key] for key in named}) == (
            202 if method == "PATCH" else 200, named,
        )  # fmt: skip
        assert reported["worker"]["url"] == A


async def test_another_url_in_a_put_is_refused_in_either_dialect(api):
    status, body = await message(api, "PUT", f"/workers/{ID_A}", {"url": B})
    assert (status, body) == (400, "url must stay the same; add a worker for another url")


async def test_a_router_answers_at_once_unless_the_client_waits():
    api = build_api(entry(A), services={"dialect": "sglang"})
    status, body, headers = await call(api, "POST", "/workers", {"url": C})
    assert (status, body["status"], body["url"]) == (202, "accepted", C)
    assert headers["Location"] == body["location"]
    assert api.prober.probed == []
    assert (await call(api, "PUT", body["location"], {"url": C}))[0] == 202
    assert (await call(api, "DELETE", body["location"]))[0] == 202
    assert api.fleet.find(C) is None
    waits = {"Prefer": "wait=1"}
    status, body, _ = await call(api, "POST", "/workers", {"url": C}, **waits)
    assert (status, body["error"]["code"]) == (400, "worker_not_healthy")
    assert api.fleet.find(C) is None


@pytest.mark.parametrize(
    ("dialect", "headers"),
    [("omni", {"Prefer": "wait"}), ("sglang", {"Prefer": "wait=30"}), ("vllm", {})],
)
async def test_a_200_after_waiting_means_registered_and_routable(
    engines, autojump_clock, dialect, headers
):
    engines.replies[C, "/health"] = [(503, b"loading"), (200, b"{}")]
    api = build_api(entry(A), services={"dialect": dialect})
    body = {"url": C, "worker_type": "regular", "bootstrap_host": "x"}
    status, reported, _ = await call(api, "POST", "/workers", body, **headers)
    assert (status, reported["status"], reported["success"], reported["url"]) == (
        200,
        "ok",
        True,
        C,
    )
    assert reported["worker"]["routable"] is True
    assert reported["ignored"] == ["bootstrap_host"]
    status, reported, _ = await call(api, "POST", "/workers", body, **headers)
    assert (status, reported["code"]) == (409, "WORKER_ALREADY_EXISTS")


async def test_without_waiting_the_reply_is_immediate_in_every_dialect():
    api = build_api(entry(A), services={"dialect": "vllm"})
    at_once = {"Prefer": "respond-async"}
    assert (await call(api, "POST", "/workers", {"url": C}, **at_once))[0] == 202


async def test_a_wait_that_is_no_number_is_refused(api):
    status, body, _ = await call(api, "POST", "/workers", {"url": C}, Prefer="wait=long")
    assert (status, body["error"]["message"]) == (
        400,
        "Prefer: wait=long: write seconds, up to 7200",
    )


@pytest.mark.parametrize("key", ["PUT", "PATCH"])
async def test_smgs_put_and_patch_leave_notes(api, key):
    body = {"cost": 2.5} if key == "PATCH" else {"cost": 2.5, "url": A, "worker_type": "regular"}
    assert (await call(api, key, f"/workers/{ID_A}", body))[0] == 202
    assert (await call(api, "GET", f"/workers/{ID_A}"))[1]["cost"] == 2.5


async def test_a_patch_takes_smgs_keys_only(api):
    output = await message(api, "PATCH", f"/workers/{ID_A}", {"disabled": True})
    assert output == (400, "unsupported fields: disabled")


async def test_notes_go_with_their_worker(api):
    await call(api, "POST", "/workers", {"url": C, "cost": 9})
    await call(api, "DELETE", f"/workers/{C}")
    await call(api, "POST", "/workers", {"url": C, "priority": 1})
    assert (await call(api, "GET", f"/workers/{C}"))[1]["cost"] == 1.0


async def test_a_removal_without_waiting_gets_a_202(api):
    prefer = {"Prefer": "respond-async"}
    status, body, headers = await call(api, "DELETE", f"/workers/{ID_A}", **prefer)
    assert (status, body["status"], body["url"]) == (202, "accepted", A)
    assert headers["Location"] == body["location"] == f"/workers/{ID_A}"
    assert (await call(api, "GET", body["location"]))[0] == 404


async def test_an_addition_in_the_background_has_a_job_until_it_is_seen_well(api):
    client = api.client()
    added = await client.post("/workers", json={"url": C, "priority": 3})
    assert added.status_code == 202
    place = added.headers["Location"]
    job = (await (await client.get(place)).get_json())["job_status"]
    assert (job["job_type"], job["worker_url"], job["status"]) == ("AddWorker", C, "pending")
    worker = api.worker(C)
    api.fleet.observe_probe(worker, status=None, error="refused", at=NOW, epoch=0)
    job = (await (await client.get(place)).get_json())["job_status"]
    assert (job["status"], job["message"]) == ("processing", "refused")
    api.healthy(C)
    assert "job_status" not in await (await client.get(place)).get_json()
    api.fleet.mark_dead(worker, NOW)
    assert "job_status" not in await (await client.get(place)).get_json()


async def test_a_job_whose_worker_died_has_failed(api):
    client = api.client()
    place = (await client.post("/workers", json={"url": C, "cost": 1})).headers["Location"]
    api.fleet.mark_dead(api.worker(C), NOW)
    assert (await (await client.get(place)).get_json())["job_status"]["status"] == "failed"


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("POST", "/workers", {"url": A}, "WORKER_ALREADY_EXISTS"),
        ("POST", "/workers", {}, "BAD_REQUEST"),
        ("POST", "/workers", {"url": "ftp://x"}, "BAD_REQUEST"),
        ("POST", "/workers", {"url": C, "worker_type": "encode"}, "BAD_REQUEST"),
        ("POST", "/workers", {"url": C, "colour": "red"}, "BAD_REQUEST"),
        ("POST", "/workers", b"{", "BAD_REQUEST"),
        ("GET", "/workers/none", None, "WORKER_NOT_FOUND"),
        ("PUT", "/workers/none", {"priority": 1}, "WORKER_NOT_FOUND"),
        ("PUT", f"/workers/{ID_A}", {"url": C, "priority": 1}, "BAD_REQUEST"),
        ("PATCH", "/workers/none", {"priority": 1}, "WORKER_NOT_FOUND"),
        ("PATCH", f"/workers/{ID_A}", {"priority": -1}, "BAD_REQUEST"),
        ("DELETE", "/workers/none", None, "WORKER_NOT_FOUND"),
    ],
)
async def test_refusals_carry_the_other_dialects_code_too(api, method, path, body, code):
    _, reported, headers = await call(api, method, path, body)
    assert (reported["code"], headers["X-SMG-Error-Code"]) == (code, code)
    assert headers.getlist("X-SMG-Error-Code") == [code]


async def test_an_addition_that_takes_too_long_has_failed_until_it_is_well():
    api = build_api(entry(A), health=HealthConfig(startup_timeout_secs=1e-9))
    client = api.client()
    place = (await client.post("/workers", json={"url": C, "priority": 3})).headers["Location"]
    assert (await (await client.get(place)).get_json())["job_status"]["status"] == "failed"
    api.healthy(C)
    assert "job_status" not in await (await client.get(place)).get_json()


async def test_clients_of_sglang_router_find_the_ids_that_they_check():
    """miles reads each as a UUID, and the location as made of it."""
    api = build_api(entry(A), services={"dialect": "sglang"})
    status, body, headers = await call(api, "POST", "/workers", {"url": C})
    name = body["worker_id"]
    assert (status, body["url"]) == (202, C)
    assert str(UUID(name)) == name
    assert body["location"] == headers["Location"] == f"/workers/{name}"
    listed = (await call(api, "GET", "/workers"))[1]["workers"]
    assert {each["id"] for each in listed if each["url"] == C} == {name}
    assert len({UUID(each["id"]) for each in listed}) == 2
    status, one, _ = await call(api, "GET", f"/workers/{name}")
    assert (status, one["id"], one["url"]) == (200, name, C)
    status, gone, _ = await call(api, "DELETE", f"/workers/{name}")
    assert (status, gone["worker_id"], gone["status"]) == (202, name, "accepted")
    assert (await call(api, "GET", f"/workers/{name}"))[0] == 404
    # Ours are known as well, and theirs in every dialect.
    assert (await call(api, "GET", f"/workers/{ID_A}"))[0] == 200
    plain = build_api(entry(A))
    theirs = next(each["id"] for each in listed if each["url"] == A)
    assert (await call(plain, "GET", f"/workers/{theirs}"))[1]["id"] == ID_A
