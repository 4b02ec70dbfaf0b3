"""The proxy is killed during an update: workers with unknown weights get no requests."""

import json

import httpx
import pytest
import trio

from tests.promises.support.engines import engines
from tests.promises.support.fleet_program import program, record, toml

pytestmark = pytest.mark.usefixtures("soon")
UPDATE = "/update_weights_from_disk"
BODY = {"model_path": "/m", "weight_version": "v2"}


async def kill_during_update(file, fleet):
    async with trio.open_nursery() as nursery, program("--config", file) as running:
        await running.until_routable(*fleet)

        async def update():
            with pytest.raises(httpx.HTTPError):
                await running.client.post(UPDATE, json=BODY)

        nursery.start_soon(update)
        for engine in fleet:
            await engine.asked[UPDATE].wait()
        assert (file.parent / "proxy.weights" / "journal.json").exists()
        running.process.kill()
        await running.process.wait()


def cordons_of(listed):
    return [worker["held_by"] for worker in listed["workers"]]


async def test_after_a_kill_the_targets_are_held_until_resolve(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as fleet:
        for engine in fleet:
            engine.wait_at(UPDATE)
        file.write_text(toml(fleet))
        await kill_during_update(file, fleet)
        async with program("--config", file) as running:
            body = await running.until(
                "/workers", lambda body: body["healthy_workers"] == len(fleet)
            )
            assert cordons_of(body) == [["uncertain"]] * 2
            weights = await running.get_json("/weights")
            for engine in fleet:
                assert "update_weights_from_disk was under way" in weights["uncertain"][engine.url]
            assert (await running.ask()).status_code == 503
            # A trainer that only continues generation changes nothing.
            assert (await running.client.post("/continue_generation", json={})).is_success
            assert cordons_of(await running.get_json("/workers")) == [["uncertain"]] * 2
            for resolve in ("/weights/resolve", "/weight_update_journal/resolve"):
                response = await running.client.post(resolve, json={})
                assert (response.status_code, response.json()["success"]) == (422, False)
            for engine in fleet:
                engine.calls.clear()
            response = await running.client.post("/weights/resolve", json={"acknowledge": True})
            body = response.json()
            assert (response.status_code, body["status"]) == (200, "ok")
            assert body["journal_readable"] is True
            assert len(body["resolved_worker_ids"]) == 2
            assert [engine.paths()[0] for engine in fleet] == ["/continue_generation"] * 2
            await running.until_routable(*fleet)
            assert not (tmp_path / "proxy.weights" / "journal.json").exists()


async def test_a_successful_update_of_all_workers_releases_the_targets_too(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as fleet:
        for engine in fleet:
            engine.wait_at(UPDATE)
        file.write_text(toml(fleet))
        await kill_during_update(file, fleet)
        for engine in fleet:
            engine.gates[UPDATE].set()
        async with program("--config", file) as running:
            await running.until("/workers", lambda body: body["healthy_workers"] == 2)
            assert (await running.client.post(UPDATE, json=BODY)).status_code == 200
            await running.until_routable(*fleet)
            # The epoch counts on from the state journal.
            assert (await running.get_json("/weights"))["weight_epoch"] == 1
        async with program("--config", file) as running:
            body = await running.until_routable(*fleet)
            await running.until(
                "/workers", lambda body: all(worker["weight_epoch"] for worker in body["workers"])
            )
            assert record(body, fleet[0])["held_by"] == []


async def test_an_unreadable_journal_holds_all_workers(tmp_path):
    file = tmp_path / "proxy.toml"
    folder = tmp_path / "proxy.weights"
    folder.mkdir(mode=0o700)
    (folder / "journal.json").write_text('{"format": 1, "begun": {"oper')
    async with engines(1) as (engine,):
        file.write_text(toml([engine]))
        async with program("--config", file) as running:
            body = await running.until("/workers", lambda body: body["healthy_workers"] == 1)
            assert cordons_of(body) == [["uncertain"]]
            journal = json.loads((folder / "journal.json").read_text())
            assert list(journal["uncertain"]) == [engine.url]
            assert (folder / "journal.unreadable").exists()
            response = await running.client.post("/weights/resolve", json={"acknowledge": True})
            assert response.json()["journal_readable"] is False
            await running.until_routable(engine)


async def test_an_update_that_cannot_be_recorded_is_not_started(tmp_path):
    file = tmp_path / "proxy.toml"
    (tmp_path / "proxy.weights").write_text("a file where a folder should be")
    async with engines(1) as (engine,):
        file.write_text(toml([engine]))
        async with program("--config", file) as running:
            await running.until("/workers", lambda body: body["healthy_workers"] == 1)
            assert (
                await running.client.post("/weights/resolve", json={"acknowledge": True})
            ).json()
            await running.until_routable(engine)
            response = await running.client.post(UPDATE, json=BODY)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "journal_unwritable"
            assert engine.paths(UPDATE) == []
            assert record(await running.get_json("/workers"), engine)["routable"] is True
