"""The proxy is killed during an update: workers with unknown weights get no requests."""

import json

import httpx
import pytest
import trio

from tests.promises.engines import engines
from tests.promises.fleet_program import program, record, toml

pytestmark = pytest.mark.usefixtures("soon")
UPDATE = "/update_weights_from_disk"
BODY = {"model_path": "/m", "weight_version": "v2"}


async def kill_in_the_middle(file, both):
    async with trio.open_nursery() as nursery, program("--config", file) as running:
        await running.until_routable(*both)

        async def update():
            with pytest.raises(httpx.HTTPError):
                await running.client.post(UPDATE, json=BODY)

        nursery.start_soon(update)
        for engine in both:
            await engine.asked[UPDATE].wait()
        assert (file.parent / "proxy.weights" / "journal.json").exists()
        running.process.kill()
        await running.process.wait()


def held(reported):
    return [each["held_by"] for each in reported["workers"]]


async def test_after_a_kill_the_targets_are_held_until_resolve(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as both:
        for engine in both:
            engine.wait_at(UPDATE)
        file.write_text(toml(both))
        await kill_in_the_middle(file, both)
        async with program("--config", file) as running:
            body = await running.until(
                "/workers", lambda body: body["healthy_workers"] == len(both)
            )
            assert held(body) == [["uncertain"]] * 2
            weights = await running.get_json("/weights")
            for engine in both:
                assert "update_weights_from_disk was under way" in weights["uncertain"][engine.url]
            assert (await running.ask()).status_code == 503
            # A trainer that just continues changes nothing.
            assert (await running.client.post("/continue_generation", json={})).is_success
            assert held(await running.get_json("/workers")) == [["uncertain"]] * 2
            for resolve in ("/weights/resolve", "/weight_update_journal/resolve"):
                answer = await running.client.post(resolve, json={})
                assert (answer.status_code, answer.json()["success"]) == (422, False)
            for engine in both:
                engine.calls.clear()
            answer = await running.client.post("/weights/resolve", json={"acknowledge": True})
            body = answer.json()
            assert (answer.status_code, body["status"]) == (200, "ok")
            assert body["journal_readable"] is True
            assert len(body["resolved_worker_ids"]) == 2
            assert [engine.paths()[0] for engine in both] == ["/continue_generation"] * 2
            await running.until_routable(*both)
            assert not (tmp_path / "proxy.weights" / "journal.json").exists()


async def test_a_successful_whole_update_releases_the_targets_too(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as both:
        for engine in both:
            engine.wait_at(UPDATE)
        file.write_text(toml(both))
        await kill_in_the_middle(file, both)
        for engine in both:
            engine.gates[UPDATE].set()
        async with program("--config", file) as running:
            await running.until("/workers", lambda body: body["healthy_workers"] == 2)
            assert (await running.client.post(UPDATE, json=BODY)).status_code == 200
            await running.until_routable(*both)
            # The epoch continues.
            assert (await running.get_json("/weights"))["weight_epoch"] == 1
        async with program("--config", file) as running:
            body = await running.until_routable(*both)
            await running.until(
                "/workers", lambda body: all(each["weight_epoch"] for each in body["workers"])
            )
            assert record(body, both[0])["held_by"] == []


async def test_an_unreadable_journal_holds_all_workers(tmp_path):
    file = tmp_path / "proxy.toml"
    folder = tmp_path / "proxy.weights"
    folder.mkdir(mode=0o700)
    (folder / "journal.json").write_text('{"format": 1, "begun": {"oper')
    async with engines(1) as (engine,):
        file.write_text(toml([engine]))
        async with program("--config", file) as running:
            body = await running.until("/workers", lambda body: body["healthy_workers"] == 1)
            assert held(body) == [["uncertain"]]
            named = json.loads((folder / "journal.json").read_text())
            assert list(named["uncertain"]) == [engine.url]
            assert (folder / "journal.unreadable").exists()
            answer = await running.client.post("/weights/resolve", json={"acknowledge": True})
            assert answer.json()["journal_readable"] is False
            await running.until_routable(engine)


async def test_an_update_that_cannot_be_recorded_is_not_begun(tmp_path):
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
            answer = await running.client.post(UPDATE, json=BODY)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "journal_unwritable"
            assert engine.paths(UPDATE) == []
            assert record(await running.get_json("/workers"), engine)["routable"] is True
