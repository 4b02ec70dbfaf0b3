"""Roles and data-parallel ranks of workers over HTTP."""

import pytest

from tests.admin_api.api_fixture import A, C, build_api, entry


async def test_a_prefill_worker_is_registered_with_the_fields_of_sglang_router(api):
    body = {"url": C, "worker_type": "prefill", "bootstrap_port": 9001}
    response = await api.client().post("/workers", json=body)
    assert response.status_code == 202
    record = (await response.get_json())["worker"]
    values = [record[key] for key in ("role", "worker_type", "kv_connector", "bootstrap_port")]
    assert values == ["prefill", "prefill", "sglang", 9001]
    listed = await (await api.client().get("/workers")).get_json()
    assert listed["stats"] == {"prefill_count": 1, "decode_count": 0, "regular_count": 2}
    (saved,) = api.config_store.state.workers
    assert (saved.role, saved.bootstrap_port) == ("prefill", 9001)


async def test_the_default_connector_is_that_of_the_command_line():
    api = build_api(entry(A), startup={"kv_connector": "nixl"})
    response = await api.client().post("/workers", json={"url": C, "role": "decode"})
    assert (await response.get_json())["worker"]["kv_connector"] == "nixl"


@pytest.mark.parametrize(("method", "status"), [("PUT", 200), ("PATCH", 202)])
async def test_a_role_is_changed_over_http(api, method, status):
    path = f"/workers/{api.worker(A).id}"
    response = await api.client().open(path, method=method, json={"role": "decode"})
    assert response.status_code == status
    assert api.worker(A).role == "decode"
    assert api.fleet.has_pools


@pytest.mark.parametrize(
    ("fields", "ranks"), [({}, "auto"), ({"ranks": 4}, 4), ({"ranks": "auto"}, "auto")]
)
async def test_a_url_with_a_data_parallel_rank_is_one_worker_with_ranks(api, fields, ranks):
    url = "http://127.0.0.1:8099"
    response = await api.client().post("/workers", json={"url": f"{url}@3", **fields})
    assert response.status_code == 200, await response.get_data()
    assert api.worker(url).ranks == ranks
    for method in ("delete", "put", "get"):
        body = {"json": {"disabled": True}} if method == "put" else {}
        response = await getattr(api.client(), method)(f"/workers/{url}@3", **body)
        assert response.status_code == 400
        assert (await response.get_json())["error"]["code"] == "rank_is_no_worker"
    assert api.worker(url)
    assert (await api.client().get("/workers/http://127.0.0.1:8098@3")).status_code == 404
