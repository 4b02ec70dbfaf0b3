"""An admin call reaches every live worker, and its response has the result of each."""

import pytest
import trio

from tests.promises.support.engines import engines
from tests.promises.support.fleet_program import program, record, toml

pytestmark = pytest.mark.usefixtures("soon")
UPDATE = {"model_path": "/m", "weight_version": "v2"}


async def test_an_update_reaches_all_workers_and_is_read_back_and_verified(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as both:
        file.write_text(toml(both))
        async with program("--config", file) as running:
            await running.until_routable(*both)
            answer = await running.client.post(
                "/update_weights_from_disk", json=UPDATE, headers={"Authorization": "Bearer t"}
            )
            body = answer.json()
            assert (answer.status_code, body["success"], body["status"]) == (200, True, "ok")
            assert [result["worker"] for result in body["results"]] == [
                engine.url for engine in both
            ]
            assert body["weight_versions"] == {engine.url: "v2" for engine in both}
            assert sorted(body["verification"]["checked"]) == sorted(engine.url for engine in both)
            for engine in both:
                headers = dict(zip(engine.paths(), engine.headers, strict=True))
                assert headers["/update_weights_from_disk"]["authorization"] == "Bearer t"
            body = await running.until_routable(*both)
            assert {record(body, engine)["weight_version"] for engine in both} == {"v2"}
            assert {record(body, engine)["weight_epoch"] for engine in both} == {1}
            weights = await running.get_json("/weights")
            assert weights["history"][-1]["path"] == "/update_weights_from_disk"
            assert not (tmp_path / "proxy.weights" / "journal.json").exists()


async def test_workers_leave_rotation_during_an_update_and_return_afterwards(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as both, trio.open_nursery() as nursery:
        file.write_text(toml(both))
        for engine in both:
            engine.wait_at("/update_weights_from_disk")
        async with program("--config", file) as running:
            await running.until_routable(*both)
            nursery.start_soon(
                lambda: running.client.post("/update_weights_from_disk", json=UPDATE)
            )
            for engine in both:
                await engine.asked["/update_weights_from_disk"].wait()
            body = await running.get_json("/workers")
            assert [row["held_by"] for row in body["workers"]] == [["updating"]] * 2
            assert (await running.client.get("/ready")).status_code == 503
            assert (await running.client.get("/health")).status_code == 200
            refused = await running.ask()
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            journal = tmp_path / "proxy.weights" / "journal.json"
            assert (journal.stat().st_mode & 0o777, journal.parent.stat().st_mode & 0o777) == (
                0o600, 0o700
            )  # fmt: skip
            disabled = await running.client.put(
                "/workers/" + body["workers"][0]["worker_id"], json={"disabled": True}
            )
            assert disabled.status_code == 200
            for engine in both:
                engine.gates["/update_weights_from_disk"].set()
            await running.until_routable(both[1])
            body = await running.until(
                "/workers", lambda body: not any(row["held_by"] for row in body["workers"])
            )
            assert [row["disabled"] for row in body["workers"]] == [True, False]


async def test_a_pause_with_hold_keeps_workers_out_of_rotation_until_continue(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(1) as (engine,):
        file.write_text(toml([engine], more="[routing]\nwhile_paused = 'hold'\n"))
        async with program("--config", file) as running:
            await running.until_routable(engine)
            answer = await running.client.post("/pause_generation", json={"mode": "retract"})
            assert answer.json()["status"] == "ok"
            assert record(await running.get_json("/workers"), engine)["held_by"] == ["paused"]
            answer = await running.client.post("/continue_generation", json={})
            assert answer.json()["status"] == "ok"
            assert record(await running.get_json("/workers"), engine)["held_by"] == []
            assert ("/pause_generation", {"mode": "retract"}) in engine.calls


async def test_an_update_survives_a_disconnect_and_a_repeated_call_joins_it(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(1) as (engine,):
        file.write_text(toml([engine]))
        engine.wait_at("/update_weights_from_disk")
        async with program("--config", file) as running:
            await running.until_routable(engine)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    lambda: running.client.post("/update_weights_from_disk", json=UPDATE)
                )
                await engine.asked["/update_weights_from_disk"].wait()
                nursery.cancel_scope.cancel()
            weights = await running.get_json("/weights")
            assert weights["operation"]["step"] == "calling"
            async with trio.open_nursery() as nursery:
                answers = []

                async def again():
                    answers.append(
                        await running.client.post("/update_weights_from_disk", json=UPDATE)
                    )

                nursery.start_soon(again)
                await trio.sleep(0.3)
                engine.gates["/update_weights_from_disk"].set()
            assert answers[0].status_code == 200
            assert engine.paths("/update_weights_from_disk") == ["/update_weights_from_disk"]
