"""Worker routes in the dialects of other routers: their fields, codes, ids, 202 and jobs."""

from urllib.parse import quote
from uuid import UUID

import pytest

from omni_proxy.config.schema import HealthConfig
from tests.admin_api.api_fixture import ID_A, NOW, A, B, C, build_api, call, entry, message


async def test_a_record_has_the_fields_of_both_dialects(api):
    api.healthy(A)
    _, body, _ = await call(api, "GET", f"/workers/{ID_A}")
    assert (body["health_state"], body["routable"]) == ("healthy", True)
    assert (body["is_healthy"], body["status"], body["worker_type"]) == (True, "ready", "regular")
    assert (body["priority"], body["cost"], body["labels"]) == (50, 1.0, {})


async def test_an_addition_in_smgs_dialect_gets_a_202(api):
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
    status, _, response_headers = await call(
        api, "PUT", f"/workers/{C}", {"disabled": True}, **headers
    )
    assert (status, response_headers["Location"]) == (202, f"/workers/{quote(C, safe='')}")
    assert api.worker(C).disabled


async def test_every_response_names_the_worker_at_the_top_level(api):
    identity = {"worker_id": ID_A, "url": A, "location": f"/workers/{ID_A}"}
    await call(api, "DELETE", f"/workers/{A}")
    for method, path, body in (
        ("POST", "/workers", {"url": A}),
        ("PUT", f"/workers/{ID_A}", {"disabled": False}),
        ("PUT", f"/workers/{ID_A}", {"url": A}),
        ("PATCH", f"/workers/{ID_A}", {"cost": 1}),
    ):
        status, content, _ = await call(api, method, path, body)
        assert (status, {key: content[key] for key in identity}) == (
            202 if method == "PATCH" else 200, identity,
        )  # fmt: skip
        assert content["worker"]["url"] == A


async def test_a_put_with_another_url_is_refused_in_both_dialects(api):
    status, body = await message(api, "PUT", f"/workers/{ID_A}", {"url": B})
    assert (status, body) == (400, "url must stay the same; add a worker for another url")


async def test_in_sglangs_dialect_the_reply_is_immediate_unless_the_client_waits():
    api = build_api(entry(A), startup={"dialect": "sglang"})
    status, body, headers = await call(api, "POST", "/workers", {"url": C})
    assert (status, body["status"], body["url"]) == (202, "accepted", C)
    assert headers["Location"] == body["location"]
    assert api.prober.probed == []
    assert (await call(api, "PUT", body["location"], {"url": C}))[0] == 202
    assert (await call(api, "DELETE", body["location"]))[0] == 202
    assert api.fleet.find(C) is None
    wait = {"Prefer": "wait=1"}
    status, body, _ = await call(api, "POST", "/workers", {"url": C}, **wait)
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
    api = build_api(entry(A), startup={"dialect": dialect})
    body = {"url": C, "worker_type": "regular", "bootstrap_host": "x"}
    status, content, _ = await call(api, "POST", "/workers", body, **headers)
    assert (status, content["status"], content["success"], content["url"]) == (
        200,
        "ok",
        True,
        C,
    )
    assert content["worker"]["routable"] is True
    assert content["ignored"] == ["bootstrap_host"]
    status, content, _ = await call(api, "POST", "/workers", body, **headers)
    assert (status, content["code"]) == (409, "WORKER_ALREADY_EXISTS")


async def test_without_waiting_the_reply_is_immediate_in_every_dialect():
    api = build_api(entry(A), startup={"dialect": "vllm"})
    respond_async = {"Prefer": "respond-async"}
    assert (await call(api, "POST", "/workers", {"url": C}, **respond_async))[0] == 202


async def test_a_wait_that_is_not_a_number_is_refused(api):
    status, body, _ = await call(api, "POST", "/workers", {"url": C}, Prefer="wait=long")
    assert (status, body["error"]["message"]) == (
        400,
        "Prefer: wait=long: write seconds, up to 7200",
    )


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_put_and_patch_of_smg_fields_are_stored(api, method):
    body = {"cost": 2.5} if method == "PATCH" else {"cost": 2.5, "url": A, "worker_type": "regular"}
    assert (await call(api, method, f"/workers/{ID_A}", body))[0] == 202
    assert (await call(api, "GET", f"/workers/{ID_A}"))[1]["cost"] == 2.5


async def test_a_patch_accepts_smg_fields_only(api):
    response = await message(api, "PATCH", f"/workers/{ID_A}", {"disabled": True})
    assert response == (400, "unsupported fields: disabled")


async def test_smg_fields_are_deleted_with_their_worker(api):
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


async def test_a_background_addition_has_a_job_until_the_worker_is_healthy(api):
    client = api.client()
    added = await client.post("/workers", json={"url": C, "priority": 3})
    assert added.status_code == 202
    location = added.headers["Location"]
    job = (await (await client.get(location)).get_json())["job_status"]
    assert (job["job_type"], job["worker_url"], job["status"]) == ("AddWorker", C, "pending")
    worker = api.worker(C)
    api.fleet.observe_probe(worker, status=None, error="refused", at=NOW, epoch=0)
    job = (await (await client.get(location)).get_json())["job_status"]
    assert (job["status"], job["message"]) == ("processing", "refused")
    api.healthy(C)
    assert "job_status" not in await (await client.get(location)).get_json()
    api.fleet.mark_dead(worker, NOW)
    assert "job_status" not in await (await client.get(location)).get_json()


async def test_a_job_whose_worker_died_has_failed(api):
    client = api.client()
    location = (await client.post("/workers", json={"url": C, "cost": 1})).headers["Location"]
    api.fleet.mark_dead(api.worker(C), NOW)
    assert (await (await client.get(location)).get_json())["job_status"]["status"] == "failed"


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
async def test_refusals_also_have_the_code_of_smgs_dialect(api, method, path, body, code):
    _, content, headers = await call(api, method, path, body)
    assert (content["code"], headers["X-SMG-Error-Code"]) == (code, code)
    assert headers.getlist("X-SMG-Error-Code") == [code]


async def test_an_addition_that_takes_too_long_fails_until_the_worker_is_healthy():
    api = build_api(entry(A), health=HealthConfig(startup_timeout_secs=1e-9))
    client = api.client()
    location = (await client.post("/workers", json={"url": C, "priority": 3})).headers["Location"]
    assert (await (await client.get(location)).get_json())["job_status"]["status"] == "failed"
    api.healthy(C)
    assert "job_status" not in await (await client.get(location)).get_json()


async def test_clients_of_sglang_router_get_uuids_as_ids():
    """miles parses each id as a UUID, and expects the location to contain it."""
    api = build_api(entry(A), startup={"dialect": "sglang"})
    status, body, headers = await call(api, "POST", "/workers", {"url": C})
    name = body["worker_id"]
    assert (status, body["url"]) == (202, C)
    assert str(UUID(name)) == name
    assert body["location"] == headers["Location"] == f"/workers/{name}"
    listed = (await call(api, "GET", "/workers"))[1]["workers"]
    assert {worker["id"] for worker in listed if worker["url"] == C} == {name}
    assert len({UUID(worker["id"]) for worker in listed}) == 2
    status, record, _ = await call(api, "GET", f"/workers/{name}")
    assert (status, record["id"], record["url"]) == (200, name, C)
    status, removed, _ = await call(api, "DELETE", f"/workers/{name}")
    assert (status, removed["worker_id"], removed["status"]) == (202, name, "accepted")
    assert (await call(api, "GET", f"/workers/{name}"))[0] == 404
    # The proxy's own ids are accepted too, and UUIDs in every dialect.
    assert (await call(api, "GET", f"/workers/{ID_A}"))[0] == 200
    plain = build_api(entry(A))
    uuid = next(worker["id"] for worker in listed if worker["url"] == A)
    assert (await call(plain, "GET", f"/workers/{uuid}"))[1]["id"] == ID_A
