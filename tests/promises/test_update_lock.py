"""Two trainers at once: one operation runs, the other is queued or refused by name."""

import pytest
import trio

from tests.promises.engines import engines
from tests.promises.fleet_program import program, record, toml

pytestmark = pytest.mark.usefixtures("soon")
UPDATE = "/update_weights_from_disk"
# Group calls are forwarded to the workers unchanged.
PLAIN = '[weight_sync]\nmode = "off"\n'


def body(version):
    return {"model_path": f"/{version}", "weight_version": version}


async def test_a_second_operation_gets_a_503_that_names_the_first(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as both, trio.open_nursery() as nursery:
        for engine in both:
            engine.wait_at(UPDATE)
        file.write_text(toml(both, more="[admin]\nlock_timeout_secs = 0.3\n"))
        async with program("--config", file) as running:
            await running.until_routable(*both)
            first = {"User-Agent": "trainer-one"}
            answers = []

            async def one():
                answers.append(await running.client.post(UPDATE, json=body("a"), headers=first))

            nursery.start_soon(one)
            await both[0].asked[UPDATE].wait()
            # The same body from another caller is another call.
            for second in (body("b"), body("a")):
                refused = await running.client.post(UPDATE, json=second)
                reported = refused.json()
                assert (refused.status_code, reported["success"], reported["status"]) == (
                    503, False, "error",
                )  # fmt: skip
                assert reported["message"].startswith("admin update lock not acquired within 0.3s")
                assert (
                    "update_weights_from_disk of trainer-one from 127.0.0.1 began"
                    in reported["message"]
                )
                assert reported["holder"]["step"] == "calling"
                assert reported["error"]["code"] == "update_in_progress"
                assert refused.headers["retry-after"] == "1"
            # A call that changes no weights is not queued.
            assert (await running.client.get("/model_info")).status_code == 200
            assert (await running.client.post("/continue_generation", json={})).status_code == 200
            for engine in both:
                engine.gates[UPDATE].set()
            await running.until_routable(*both)
            assert answers[0].status_code == 200
            assert [engine.paths(UPDATE) for engine in both] == [[UPDATE], [UPDATE]]


async def test_queued_operations_never_overlap_at_a_worker(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as both:
        file.write_text(toml(both, more=PLAIN))
        async with program("--config", file) as running:
            await running.until_routable(*both)
            statuses = []

            async def trainer(name):
                for path, payload in (
                    ("/pause_generation", {"mode": "retract"}),
                    (UPDATE, body(name)),
                    ("/destroy_weights_update_group", {"group_name": name}),
                ):
                    answer = await running.client.post(path, json=payload)
                    statuses.append(answer.status_code)

            async with trio.open_nursery() as nursery:
                for name in ("a", "b", "c"):
                    nursery.start_soon(trainer, name)
            assert statuses == [200] * 9
            for engine in both:
                assert engine.overlaps == []
                assert len(engine.paths(UPDATE)) == 3
            orders = [[b for p, b in engine.calls if p == UPDATE] for engine in both]
            assert orders[0] == orders[1]
            weights = await running.get_json("/weights")
            assert (weights["weight_epoch"], weights["operation"]) == (3, None)


async def test_a_fleet_change_waits_for_an_operation_and_a_disable_does_not(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as both, trio.open_nursery() as nursery:
        one, late = both
        one.wait_at(UPDATE)
        file.write_text(toml([one]))
        async with program("--config", file) as running:
            await running.until_routable(one)
            nursery.start_soon(lambda: running.client.post(UPDATE, json=body("a")))
            await one.asked[UPDATE].wait()
            added = trio.Event()

            async def add():
                answer = await running.client.post("/workers", json={"url": late.url})
                assert answer.status_code == 200
                added.set()

            nursery.start_soon(add)
            name = record(await running.get_json("/workers"), one)["worker_id"]
            for switch in ({"disabled": True}, {"disabled": False}, {"is_dead": True}):
                assert (await running.client.put(f"/workers/{name}", json=switch)).is_success
            reported = await running.get_json("/workers")
            assert [each["url"] for each in reported["workers"]] == [one.url]
            assert reported["workers"][0]["health_state"] == "dead"
            assert not added.is_set()
            one.gates[UPDATE].set()
            await added.wait()
            assert late.paths(UPDATE) == []


async def test_a_failed_init_disables_its_worker_until_it_is_enabled(tmp_path):
    file = tmp_path / "proxy.toml"
    init = "/init_weights_update_group"
    async with engines(1) as (engine,):
        engine.says[init] = (400, {"detail": {"success": False, "message": "no trainer"}})
        file.write_text(toml([engine], more=PLAIN))
        async with program("--config", file) as running:
            await running.until_routable(engine)
            answer = await running.client.post(init, json={"world_size": 2})
            (result,) = answer.json()["results"]
            assert (answer.status_code, result["standing"]) == (502, "disabled")
            assert "no trainer" in result["reason"]
            shown = record(await running.get_json("/workers"), engine)
            assert (shown["disabled"], shown["held_by"]) == (True, [])
            enabled = await running.client.put(
                f"/workers/{shown['worker_id']}", json={"disabled": False}
            )
            assert enabled.json()["worker"]["routable"] is True
