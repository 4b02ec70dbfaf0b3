"""Two trainers at once: one operation runs; others are queued, or rejected with its name."""

import pytest
import trio

from tests.promises.support.engines import engines
from tests.promises.support.fleet_program import program, record, toml

pytestmark = pytest.mark.usefixtures("soon")
UPDATE = "/update_weights_from_disk"
# Group calls are forwarded to the workers unchanged.
SYNC_OFF = '[weight_sync]\nmode = "off"\n'


def body(version):
    return {"model_path": f"/{version}", "weight_version": version}


async def test_a_second_operation_gets_a_503_that_names_the_first(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as fleet, trio.open_nursery() as nursery:
        for engine in fleet:
            engine.wait_at(UPDATE)
        file.write_text(toml(fleet, more="[admin]\nlock_timeout_secs = 0.3\n"))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            first_trainer = {"User-Agent": "trainer-one"}
            responses = []

            async def update():
                responses.append(
                    await running.client.post(UPDATE, json=body("a"), headers=first_trainer)
                )

            nursery.start_soon(update)
            await fleet[0].asked[UPDATE].wait()
            # The same body from another caller is another operation.
            for second_body in (body("b"), body("a")):
                refused = await running.client.post(UPDATE, json=second_body)
                error = refused.json()
                assert (refused.status_code, error["success"], error["status"]) == (
                    503, False, "error",
                )  # fmt: skip
                assert error["message"].startswith("admin update lock not acquired within 0.3s")
                assert (
                    "update_weights_from_disk of trainer-one from 127.0.0.1 began"
                    in error["message"]
                )
                assert error["holder"]["step"] == "calling"
                assert error["error"]["code"] == "update_in_progress"
                assert refused.headers["retry-after"] == "1"
            # A call that changes no weights is not queued.
            assert (await running.client.get("/model_info")).status_code == 200
            assert (await running.client.post("/continue_generation", json={})).status_code == 200
            for engine in fleet:
                engine.gates[UPDATE].set()
            await running.until_routable(*fleet)
            assert responses[0].status_code == 200
            assert [engine.paths(UPDATE) for engine in fleet] == [[UPDATE], [UPDATE]]


async def test_queued_operations_never_overlap_at_a_worker(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as fleet:
        file.write_text(toml(fleet, more=SYNC_OFF))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            statuses = []

            async def trainer(name):
                for path, payload in (
                    ("/pause_generation", {"mode": "retract"}),
                    (UPDATE, body(name)),
                    ("/destroy_weights_update_group", {"group_name": name}),
                ):
                    response = await running.client.post(path, json=payload)
                    statuses.append(response.status_code)

            async with trio.open_nursery() as nursery:
                for name in ("a", "b", "c"):
                    nursery.start_soon(trainer, name)
            assert statuses == [200] * 9
            for engine in fleet:
                assert engine.overlaps == []
                assert len(engine.paths(UPDATE)) == 3
            orders = [
                [received for path, received in engine.calls if path == UPDATE] for engine in fleet
            ]
            assert orders[0] == orders[1]
            weights = await running.get_json("/weights")
            assert (weights["weight_epoch"], weights["operation"]) == (3, None)


async def test_a_fleet_change_waits_for_an_operation_and_a_disable_does_not(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as fleet, trio.open_nursery() as nursery:
        one, late = fleet
        one.wait_at(UPDATE)
        file.write_text(toml([one]))
        async with program("--config", file) as running:
            await running.until_routable(one)
            nursery.start_soon(lambda: running.client.post(UPDATE, json=body("a")))
            await one.asked[UPDATE].wait()
            added = trio.Event()

            async def add():
                response = await running.client.post("/workers", json={"url": late.url})
                assert response.status_code == 200
                added.set()

            nursery.start_soon(add)
            worker_id = record(await running.get_json("/workers"), one)["worker_id"]
            for switch in ({"disabled": True}, {"disabled": False}, {"is_dead": True}):
                assert (await running.client.put(f"/workers/{worker_id}", json=switch)).is_success
            listed = await running.get_json("/workers")
            assert [worker["url"] for worker in listed["workers"]] == [one.url]
            assert listed["workers"][0]["health_state"] == "dead"
            assert not added.is_set()
            one.gates[UPDATE].set()
            await added.wait()
            assert late.paths(UPDATE) == []


async def test_a_failed_init_disables_its_worker_until_it_is_enabled(tmp_path):
    file = tmp_path / "proxy.toml"
    init = "/init_weights_update_group"
    async with engines(1) as (engine,):
        engine.responses[init] = (400, {"detail": {"success": False, "message": "no trainer"}})
        file.write_text(toml([engine], more=SYNC_OFF))
        async with program("--config", file) as running:
            await running.until_routable(engine)
            response = await running.client.post(init, json={"world_size": 2})
            (result,) = response.json()["results"]
            assert (response.status_code, result["standing"]) == (502, "disabled")
            assert "no trainer" in result["reason"]
            listed = record(await running.get_json("/workers"), engine)
            assert (listed["disabled"], listed["held_by"]) == (True, [])
            enabled = await running.client.put(
                f"/workers/{listed['worker_id']}", json={"disabled": False}
            )
            assert enabled.json()["worker"]["routable"] is True
