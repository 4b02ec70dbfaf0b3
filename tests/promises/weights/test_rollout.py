"""Rollouts update a serving fleet a few workers at a time; a failed rollout is rolled back."""

import json
from collections import defaultdict
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import trio

from tests.promises.support.engines import engines
from tests.promises.support.fleet_program import program, record
from tests.promises.support.fleet_program import toml as engines_toml
from tests.promises.support.tiny_fleet import CHAT, UPDATE, known, replicas, toml, weights_in

pytestmark = pytest.mark.usefixtures("soon")
ROLLOUT = "/weights/rollout"
CLIENTS = 16
ENDED = ("succeeded", "failed", "cancelled")


@pytest.fixture
def models():
    for module in ("torch", "tiktoken", "safetensors.torch"):
        pytest.importorskip(module)


class Clients:
    """Clients that send requests in a loop, half of them for streams; keeps texts by weight label.

    They pause between requests; otherwise they would compete with the replicas for CPU time.
    """

    def __init__(self, running, pause_secs=0.2):
        self._client = running.client
        self._pause_secs = pause_secs
        self.texts, self.faults = defaultdict(set), []
        self.answers = 0

    @asynccontextmanager
    async def running(self, count=4):
        self._stopped = trio.Event()
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(self._ask, bool(number % 2))
            await self.more(2 * count)
            yield self
            await self.more(2 * count)
            self._stopped.set()

    async def more(self, count=8):
        enough = self.answers + count
        while self.answers < enough:
            await trio.sleep(0.01)

    async def _ask(self, streams):
        while not self._stopped.is_set():
            try:
                await (self._stream() if streams else self._whole())
            except httpx.HTTPError as error:
                self.faults.append(repr(error))
            self.answers += 1
            await trio.sleep(self._pause_secs)

    async def _whole(self):
        response = await self._client.post("/v1/chat/completions", json=CHAT)
        if response.status_code == 200:
            self._note(response.headers, response.json()["choices"][0]["message"]["content"])
        else:
            self.faults.append((response.status_code, response.text[:300]))

    async def _stream(self):
        body = {**CHAT, "stream": True}
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                self.faults.append((response.status_code, (await response.aread())[:300]))
                return
            lines = [line async for line in response.aiter_lines() if line.startswith("data:")]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data:")) for line in lines[:-1]]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        self._note(response.headers, "".join(delta.get("content") or "" for delta in deltas))

    def _note(self, headers, text):
        if "x-omni-weight-version-end" in headers:
            self.faults.append(("spans two versions", dict(headers)))
        self.texts[headers["x-omni-weight-version"]].add(text)


async def until_ended(running):
    return await running.until(ROLLOUT, lambda body: body["state"] in ENDED)


async def start_rollout(running, **fields):
    response = await running.client.post(ROLLOUT, json=fields)
    assert (response.status_code, response.headers["location"]) == (202, ROLLOUT), response.text
    return response.json()["rollout"]


def states(rollout):
    return [row["state"] for row in rollout["workers"]]


@pytest.mark.parametrize("processes", [1, 2])
async def test_sixteen_clients_get_no_error_and_no_mixed_versions(tmp_path, models, processes):
    file, new = tmp_path / "proxy.toml", weights_in(tmp_path)
    async with replicas(3) as fleet:
        text = toml(fleet).replace("[server]\n", f"[server]\nprocesses = {processes}\n")
        file.write_text(text)
        async with program("--config", file) as running:
            await known(running, 3)
            clients = Clients(running, pause_secs=0.5)
            async with clients.running(CLIENTS):
                await start_rollout(running, model_path=new.path, weight_version="v2")
                body = await until_ended(running)
            assert (body["state"], body["updated"]) == ("succeeded", 3), body
            assert clients.faults == []
            assert sorted(clients.texts) == ["default", "v2"]
            assert [len(texts) for texts in clients.texts.values()] == [1, 1], clients.texts
            assert clients.texts["default"] != clients.texts["v2"]
            weights = await running.get_json("/weights")
            assert {row["weight_version"] for row in weights["workers"]} == {"v2"}
            assert (weights["weight_epoch"], weights["weight_version"]) == (1, "v2")
            sums = (await running.client.post("/weights_checker", json={})).json()["results"]
            assert json.dumps(sums).count(new.checksum) >= 3


async def test_a_bad_checkpoint_stops_at_the_canary_and_the_old_version_stays(tmp_path, models):
    file, new = tmp_path / "proxy.toml", weights_in(tmp_path)
    bad = tmp_path / "bad.safetensors"
    whole = (tmp_path / "new.safetensors").read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    async with replicas(3) as fleet:
        file.write_text(toml(fleet))
        async with program("--config", file) as running:
            await known(running, 3)
            update = {"model_path": new.path, "weight_version": "v2"}
            assert (await running.client.post(UPDATE, json=update)).status_code == 200
            clients = Clients(running)
            async with clients.running():
                await start_rollout(running, model_path=str(bad), weight_version="v3")
                body = await until_ended(running)
            assert (body["state"], states(body)) == ("failed", ["restored", "pending", "pending"])
            assert "is truncated" in body["cause"]
            assert (clients.faults, list(clients.texts)) == ([], ["v2"])
            assert (await known(running, 3))["routable_workers"] == 3


@pytest.mark.parametrize(("former", "epoch"), [("v2", 1), ("default", 0)])
async def test_a_failure_after_the_canary_rolls_the_canary_back(tmp_path, models, former, epoch):
    file, new = tmp_path / "proxy.toml", weights_in(tmp_path)
    newer = tmp_path / "newer.safetensors"
    async with replicas(3) as fleet:
        file.write_text(toml(fleet))
        async with program("--config", file) as running:
            await known(running, 3)
            if former != "default":
                update = {"model_path": new.path, "weight_version": former}
                assert (await running.client.post(UPDATE, json=update)).status_code == 200
            save_tiny(9, newer)
            clients = Clients(running)
            async with clients.running():
                await start_rollout(
                    running, model_path=str(newer), weight_version="v3", pause_after_canary=True
                )
                await running.until(ROLLOUT, lambda body: body["state"] == "paused")
                await clients.more()
                newer.unlink()
                resumed = await running.client.post(f"{ROLLOUT}/resume")
                assert resumed.status_code == 200
                body = await until_ended(running)
            assert (body["state"], states(body)) == ("failed", ["restored", "restored", "pending"])
            assert clients.faults == []
            assert sorted(clients.texts) == sorted([former, "v3"])
            assert [len(texts) for texts in clients.texts.values()] == [1, 1]
            weights = await running.get_json("/weights")
            rows = {(row["weight_version"], row["weight_epoch"]) for row in weights["workers"]}
            assert rows == {(former, epoch)}
            assert weights["uncertain"] == {}


async def test_a_replica_restarted_afterwards_never_serves_its_first_weights(tmp_path, models):
    file, new = tmp_path / "proxy.toml", weights_in(tmp_path)
    async with replicas(2) as (survivor, late):
        file.write_text(toml([survivor, late]))
        async with program("--config", file) as running:
            await known(running, 2)
            await start_rollout(running, model_path=new.path, weight_version="v2")
            assert (await until_ended(running))["state"] == "succeeded"
            clients = Clients(running)
            async with clients.running(4):
                await late.kill()
                await running.until(
                    "/workers", lambda body: record(body, late)["weight_version"] is None
                )
                await late.start()
                body = await running.until("/workers", lambda body: record(body, late)["routable"])
                assert record(body, late)["weight_version"] == "v2"
                await clients.more()
            assert list(clients.texts) == ["v2"]
            assert len(clients.texts["v2"]) == 1


async def test_engines_of_both_dialects_are_updated_and_rolled_back(tmp_path, models):
    file, new = tmp_path / "proxy.toml", weights_in(tmp_path)
    newer = tmp_path / "newer.safetensors"
    save_tiny(9, newer)
    async with (
        replicas(1, "--dialect", "sglang") as (one,),
        replicas(1, "--dialect", "vllm") as (other,),
    ):
        file.write_text(toml([one, other]))
        async with program("--config", file) as running:
            await known(running, 2)
            clients = Clients(running)
            async with clients.running(4):
                await start_rollout(running, model_path=new.path, weight_version="v2")
                assert (await until_ended(running))["state"] == "succeeded"
                await start_rollout(
                    running, model_path=str(newer), weight_version="v3", pause_after_canary=True
                )
                await running.until(ROLLOUT, lambda body: body["state"] == "paused")
                while "v3" not in clients.texts:
                    await trio.sleep(0.01)
                newer.unlink()
                await running.client.post(f"{ROLLOUT}/resume")
                body = await until_ended(running)
            assert (body["state"], states(body)) == ("failed", ["restored", "restored"]), body
            assert clients.faults == []
            assert sorted(clients.texts) == ["default", "v2", "v3"]
            assert [len(texts) for texts in clients.texts.values()] == [1, 1, 1]
            weights = await running.get_json("/weights")
            assert {row["weight_version"] for row in weights["workers"]} == {"v2"}
            assert all(row["routable"] for row in weights["workers"])


def save_tiny(seed, path):
    from safetensors.torch import save_file

    from omni_proxy.replica.models import tiny

    save_file({n: t.detach().clone() for n, t in tiny.build(seed).named_parameters()}, path)


async def kill_at(running, step):
    """Resumes the rollout, and kills the proxy when a worker is reported at this step."""
    async with running.client.stream("GET", f"{ROLLOUT}?follow=1") as events:
        await running.client.post(f"{ROLLOUT}/resume")
        with suppress(httpx.HTTPError):
            async for line in events.aiter_lines():
                if f'"step":"{step}"' in line:
                    running.process.kill()
    running.process.kill()  # if the rollout ended before
    await running.process.wait()


@pytest.mark.parametrize("step", ["draining", "loading", "warming"])
async def test_a_rollout_whose_proxy_is_killed_is_completed_after_the_restart(
    tmp_path, models, step
):
    """The step in which the proxy dies depends on timing; every step must be recoverable."""
    file, new = tmp_path / "proxy.toml", weights_in(tmp_path)
    async with replicas(3) as fleet:
        file.write_text(toml(fleet))
        async with program("--config", file) as running:
            await known(running, 3)
            await start_rollout(
                running, model_path=new.path, weight_version="v2", pause_after_canary=True
            )
            await running.until(ROLLOUT, lambda body: body["state"] == "paused")
            await kill_at(running, step)
        async with program("--config", file) as running:
            await running.until(
                "/weights",
                lambda body: (
                    {row["weight_version"] for row in body["workers"]} == {"v2"}
                    and all(row["routable"] for row in body["workers"])
                ),
            )
            body = await running.until(ROLLOUT, lambda body: body["state"] in (*ENDED, "none"))
            assert body["state"] in ("succeeded", "none"), body
            clients = Clients(running)
            async with clients.running(3):
                pass
            assert (clients.faults, list(clients.texts)) == ([], ["v2"])
            assert len(clients.texts["v2"]) == 1
        assert not (tmp_path / "proxy.weights" / "journal.json").exists()


async def test_after_a_kill_the_uncertain_worker_gets_no_requests_until_updated(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as (first, second):
        second.wait_at(UPDATE)
        file.write_text(engines_toml([first, second]))
        async with program("--config", file) as running:
            await running.until_routable(first, second)
            rollout = await start_rollout(running, model_path="/m", weight_version="v2")
            await second.asked[UPDATE].wait()
            running.process.kill()
            await running.process.wait()
        second.asked[UPDATE] = trio.Event()
        async with program("--config", file) as running:
            with trio.fail_after(60):
                await second.asked[UPDATE].wait()  # the update is repeated
            body = await running.until("/workers", lambda body: body["routable_workers"] == 1)
            assert "uncertain" in record(body, second)["held_by"]
            weights = await running.get_json("/weights")
            assert f"rollout {rollout['id'][:8]} to 'v2'" in weights["uncertain"][second.url]
            assert weights["rollout"]["id"] == rollout["id"]
            assert states(weights["rollout"]) == ["updated", "updating"]
            response = await running.ask()
            assert response.headers["x-omni-weight-version"] == "v2"
            second.gates[UPDATE].set()
            body = await until_ended(running)
            assert (body["state"], body["updated"]) == ("succeeded", 2)
            await running.until_routable(first, second)
            assert (await running.get_json("/weights"))["uncertain"] == {}


async def test_the_events_of_a_rollout_show_its_state_from_running_to_succeeded(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(2) as workers:
        file.write_text(engines_toml(workers))
        async with program("--config", file) as running:
            await running.until_routable(*workers)
            body = {"model_path": "/m", "weight_version": "v2"}
            headers = {"accept": "text/event-stream"}
            async with running.client.stream(
                "POST", ROLLOUT, json=body, headers=headers
            ) as response:
                assert response.status_code == 200
                assert response.headers["content-type"] == "text/event-stream"
                lines = [line async for line in response.aiter_lines() if line.startswith("data:")]
            events = [json.loads(line.removeprefix("data:")) for line in lines]
            assert (events[0]["state"], events[-1]["state"]) == ("running", "succeeded")
            assert [event["updated"] for event in events] == sorted(e["updated"] for e in events)
            refused = await running.client.post(ROLLOUT, json=body, headers=headers)
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "label_in_use"
            assert (await running.client.post(f"{ROLLOUT}/cancel")).status_code == 409


BAD = (
    (b"[1]", 400, "invalid_json", "must be a JSON object"),
    (b"{", 400, "invalid_json", "invalid JSON body"),
    (b"{}", 400, "invalid_rollout", "nothing to roll out: give model_path"),
    (b'{"model_path": "/m"}', 400, "invalid_rollout", "weight_version is missing"),
    (b'{"model_path": "/m", "weight_version": "v", "canary": -1}', 400, "invalid_rollout",
     "canary must be a whole number"),
    (b'{"model_path": "/m", "weight_version": "v", "max_unavailabel": 2}', 400,
     "invalid_rollout", "did you mean max_unavailable?"),
    (b'{"version": 3}', 404, "no_versions", "no versions are kept"),
    (b'{"model_path": "/m", "weight_version": "default"}', 409, "label_in_use",
     "already reported by"),
)  # fmt: skip


async def test_a_bad_body_gets_a_clear_error_and_changes_nothing(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(1) as (one,):
        file.write_text(engines_toml([one]))
        async with program("--config", file) as running:
            await running.until_routable(one)
            for body, status, code, message in BAD:
                response = await running.client.post(ROLLOUT, content=body)
                result = response.json()
                assert (response.status_code, result["error"]["code"], result["success"]) == (
                    status, code, False,
                ), body  # fmt: skip
                assert message in result["message"], body
                assert one.paths(UPDATE) == [], body
                assert (await running.get_json(ROLLOUT))["state"] == "none", body
