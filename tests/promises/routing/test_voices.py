"""Requests with an uploaded voice go to the worker that has it, also after a restart."""

import json

import pytest
import trio

from tests.promises.support.fakes import counted, fake_workers
from tests.promises.support.fleet_program import program, put, routable, toml

FORM = {"files": {"audio_sample": b"RIFF"}, "data": {"name": "Bob", "consent": "yes"}}


class Voices:
    """A worker's speech routes; `spoken` has the voices of its requests."""

    def __init__(self):
        self.names, self.spoken = [], []

    async def __call__(self, call):
        method, target, _ = call.line.split()
        if target == "/v1/audio/voices?names_only=true":
            reply = {"uploaded_voice_names": self.names}
        elif target.startswith("/v1/audio/voices"):
            if method == "POST":
                self.names.append("Bob")
            if method == "DELETE":
                self.names.remove("Bob")
            reply = {"success": True}
        elif not target.startswith("/v1/audio/speech"):
            await call.send(counted(b"{}", status="404 Not Found"))
            return
        else:
            body = json.loads(call.body)
            self.spoken.append(body.get("voice"))
            reply = {"spoken": True}
        await call.send(counted(json.dumps(reply).encode(), "content-type: application/json"))


@pytest.fixture
async def pair():
    voices = Voices(), Voices()
    async with fake_workers(*voices) as fleet:
        yield fleet, voices


async def speak(running, voice, path="/v1/audio/speech", **fields):
    response = await running.client.post(path, json={"input": "x", "voice": voice, **fields})
    assert response.status_code == 200, response.text


async def until_ready(running, fleet):
    await running.until("/workers", lambda body: routable(body) == {worker.url for worker in fleet})


async def until_voices_listed(running, count):
    def has_count(health):
        routing = health["voice_routing"]
        return routing["registry_state"] == "ready" and routing["uploaded_voice_count"] == count

    return (await running.until("/health", has_count))["voice_routing"]


@pytest.mark.parametrize("processes", [1, 2])
async def test_an_uploaded_voice_is_pinned_to_its_owner_and_others_are_not(
    tmp_path, pair, processes
):
    fleet, voices = pair
    file = tmp_path / "proxy.toml"
    put(file, toml(fleet, more=f"processes = {processes}\n"))
    async with program("--config", file) as running:
        await until_ready(running, fleet)
        assert (await running.client.post("/v1/audio/voices", **FORM)).status_code == 200
        owner = next(worker for worker in voices if worker.names)
        other = next(worker for worker in voices if not worker.names)
        await until_voices_listed(running, 1)
        for turn in range(4):
            await speak(running, "Bob")
            await speak(running, "bob", "/v1/audio/speech/batch", items=[{"input": str(turn)}])
        assert other.spoken == []
        with trio.fail_after(60):
            while "alloy" not in other.spoken:
                await speak(running, "alloy")
                await trio.sleep(0.02)
        assert "Bob" in owner.spoken

        owner_url = (await running.get_json("/health"))["voice_routing"]["owner_url"]
        assert voices[[worker.url for worker in fleet].index(owner_url)] is owner
        response = await running.client.request("DELETE", "/v1/audio/voices/Bob")
        assert response.status_code == 200
        await until_voices_listed(running, 0)

    # The saved owner applies as soon as the program has restarted, before the owner is queried.
    async with program("--config", file) as running:
        routing = (await running.get_json("/health"))["voice_routing"]
        assert routing["owner_url"] == owner_url


async def test_the_list_of_voices_survives_a_restart(tmp_path, pair):
    fleet, voices = pair
    file = tmp_path / "proxy.toml"
    put(file, toml(fleet))
    async with program("--config", file) as running:
        await until_ready(running, fleet)
        await running.client.post("/v1/audio/voices", **FORM)
        await until_voices_listed(running, 1)
    other = next(worker for worker in voices if not worker.names)
    async with program("--config", file) as running:
        await until_ready(running, fleet)
        for _ in range(6):
            await speak(running, "Bob")
        assert other.spoken == []


async def test_the_configured_owner_takes_the_uploads(tmp_path, pair):
    fleet, voices = pair
    file = tmp_path / "proxy.toml"
    text = toml(fleet) + '[routing]\nvoice_owner = "{}"\n'
    put(file, text.format(fleet[1].url))
    async with program("--config", file) as running:
        await until_ready(running, fleet)
        await running.client.post("/v1/audio/voices", **FORM)
        assert [worker.names for worker in voices] == [[], ["Bob"]]
        await until_voices_listed(running, 1)
        put(file, text.format(fleet[0].url))
        moved = await running.until(
            "/health", lambda body: body["voice_routing"]["owner_url"] == fleet[0].url
        )
        assert moved["voice_routing"]["owner_routable"]
