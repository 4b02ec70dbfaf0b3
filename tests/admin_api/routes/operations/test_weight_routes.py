import pytest
from trio.testing import wait_all_tasks_blocked

from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.weight_sync.operation_fixture import LOST, UPDATE, GatedEngines, admin_call

ENGINES = GatedEngines


@pytest.fixture
async def api(engines, tmp_path, nursery):
    api = build_api(entry(A), entry(B), folder=tmp_path / "w")
    api.healthy(A, B)
    await nursery.start(api.operations.run)
    return api


async def test_weights_shows_the_operation_its_progress_versions_and_history(api, engines, nursery):
    await api.operations.submit(admin_call(caller="before"))
    engines.close_gate(UPDATE, A)
    nursery.start_soon(api.operations.submit, admin_call(caller="trainer"))
    await engines.arrived[A, UPDATE].wait()
    nursery.start_soon(api.operations.submit, admin_call("/pause_generation", caller="next"))
    await wait_all_tasks_blocked()
    response = await api.client().get("/weights")
    body = await response.get_json()
    running = body["operation"]
    assert (running["path"], running["caller"], running["step"]) == (UPDATE, "trainer", "calling")
    assert running["age_secs"] >= 0
    assert [worker["progress"] for worker in running["workers"]] == ["asked", "done"]
    assert [operation["caller"] for operation in body["waiting"]] == ["next"]
    assert (body["weight_epoch"], body["weight_version"]) == (1, "v1")
    assert [(w["weight_version"], w["weight_epoch"]) for w in body["workers"]] == [(None, 0)] * 2
    assert [w["held_by"] for w in body["workers"]] == [["updating"]] * 2
    (past,) = body["history"]
    assert (past["path"], past["http_status"], past["caller"]) == (UPDATE, 200, "before")
    assert body["journal"]["readable"] is True
    engines.open_gate(UPDATE, A)


@pytest.mark.parametrize("path", ["/weights/resolve", "/weight_update_journal/resolve"])
async def test_resolving_needs_an_acknowledgement(api, engines, path):
    engines.replies[B, UPDATE] = LOST
    await api.operations.submit(admin_call())
    for body in ({}, {"acknowledge": False}, {"acknowledge": "yes"}):
        response = await api.client().post(path, json=body)
        content = await response.get_json()
        assert (response.status_code, content["success"], content["status"]) == (
            422,
            False,
            "error",
        )
        assert api.worker(B).cordon_reasons == {"uncertain"}
    headers = {"Authorization": "Bearer t"}
    response = await api.client().post(path, json={"acknowledge": True}, headers=headers)
    content = await response.get_json()
    assert (response.status_code, content["status"]) == (200, "ok")
    assert content["resolved_worker_ids"] == [api.worker(B).id]
    continued = [r for r in engines.requests if r.url.path == "/continue_generation"]
    assert [(r.url.port, r.headers["authorization"]) for r in continued] == [(8012, "Bearer t")]
    assert api.worker(B).cordon_reasons == set()


async def test_a_worker_record_has_the_weight_version_and_epoch(api):
    await api.operations.submit(admin_call())
    response = await api.client().get(f"/workers/{api.worker(A).id}")
    body = await response.get_json()
    assert (body["weight_version"], body["weight_epoch"]) == ("v1", 1)
