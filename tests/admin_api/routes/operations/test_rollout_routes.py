import json

import pytest
import trio

from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.admin_api.fake_engines import Engines

PATH = "/weights/rollout"
BODY = {"model_path": "/m", "weight_version": "v2"}


class LoadingEngines(Engines):
    """Engines that accept every call and report the version that they loaded."""

    def __init__(self):
        super().__init__()
        self.labels = {A: "v1", B: "v1"}
        self.gate = trio.Event()
        self.gate.set()
        self.begun = trio.Event()

    async def answer(self, request):
        url = str(request.url.copy_with(raw_path=b"/")).rstrip("/")
        path = request.url.path
        if path == "/update_weights_from_disk":
            self.begun.set()
            await self.gate.wait()
            self.labels[url] = json.loads(request.content)["weight_version"]
        reply = {"weight_version": self.labels[url], "model_path": "/m/v1", "success": True}
        self.set_reply(url, path, reply)
        return await super().answer(request)


@pytest.fixture
def engines(monkeypatch):
    return LoadingEngines().install(monkeypatch)


@pytest.fixture
async def api(engines, tmp_path, nursery):
    api = build_api(entry(A), entry(B), folder=tmp_path / "weights")
    api.healthy(A, B)
    await nursery.start(api.operations.run)
    return api


def events_in(raw):
    lines = [line for line in raw.decode().splitlines() if line.startswith("data:")]
    return [json.loads(line.removeprefix("data:")) for line in lines]


async def until(api, state):
    progress = api.operations.rollouts.progress
    with trio.fail_after(30):
        while (progress.to_dict() or {}).get("state") != state:
            await progress.changed.wait()


async def test_without_a_rollout_the_state_is_none(api):
    response = await api.client().get(PATH)
    no_rollout = {"id": None, "state": "none", "workers": []}
    assert (response.status_code, await response.get_json()) == (200, no_rollout)
    response = await api.client().get(f"{PATH}?follow=true")
    assert events_in(await response.get_data()) == [no_rollout]


async def test_a_rollout_is_accepted_and_shown_at_its_location_and_at_weights(api):
    response = await api.client().post(PATH, json=BODY)
    assert (response.status_code, response.headers["location"]) == (202, PATH)
    body = await response.get_json()
    assert (body["success"], body["rollout"]["state"], body["rollout"]["total"]) == (
        True, "running", 2,
    )  # fmt: skip
    await until(api, "succeeded")
    shown = await (await api.client().get(PATH)).get_json()
    assert (shown["state"], shown["updated"], shown["id"]) == (
        "succeeded",
        2,
        body["rollout"]["id"],
    )
    assert (await (await api.client().get("/weights")).get_json())["rollout"] == shown
    feed = json.loads(await (await api.client().get("/feed?once=true")).get_data())
    assert feed["weights"]["rollout"]["id"] == shown["id"]


@pytest.mark.parametrize(
    ("path", "headers"), [(PATH, {"accept": "text/event-stream"}), (f"{PATH}?follow=true", {})]
)
async def test_a_response_with_events_ends_with_the_rollout(api, path, headers):
    response = await api.client().post(path, json=BODY, headers=headers)
    assert (response.status_code, response.content_type) == (200, "text/event-stream")
    events = events_in(await response.get_data())
    assert (events[0]["state"], events[-1]["state"]) == ("running", "succeeded")
    assert events[-1]["updated"] == 2


@pytest.mark.parametrize("step", ["pause", "resume", "cancel"])
async def test_a_step_without_a_rollout_is_a_conflict(api, step):
    response = await api.client().post(f"{PATH}/{step}")
    body = await response.get_json()
    assert (response.status_code, body["error"]["code"], body["success"]) == (
        409, "no_rollout", False,
    )  # fmt: skip


async def test_a_rollout_pauses_when_its_running_calls_have_ended(api, engines):
    engines.gate = trio.Event()
    await api.client().post(PATH, json=BODY)
    await engines.begun.wait()
    response = await api.client().post(f"{PATH}/pause")
    assert (response.status_code, (await response.get_json())["rollout"]["state"]) == (
        200, "pausing",
    )  # fmt: skip
    engines.gate.set()
    await until(api, "paused")
    assert sorted(engines.labels.values()) == ["v1", "v2"]


async def test_a_paused_rollout_is_resumed(api, engines):
    await api.client().post(PATH, json=BODY | {"pause_after_canary": True})
    await until(api, "paused")
    assert (await api.client().post(f"{PATH}/resume")).status_code == 200
    await until(api, "succeeded")
    assert engines.labels == {A: "v2", B: "v2"}


async def test_a_rollout_is_cancelled_with_its_caller_as_the_cause(api, engines):
    await api.client().post(PATH, json=BODY | {"pause_after_canary": True})
    await until(api, "paused")
    response = await api.client().post(f"{PATH}/cancel", headers={"user-agent": "me"})
    assert (await response.get_json())["rollout"]["cause"] == "cancelled by me"
    await until(api, "cancelled")
    assert "v1" in engines.labels.values()


async def test_a_rollout_has_the_workers_of_its_selector(api):
    response = await api.client().post(f"{PATH}?selector=url={B}", json=BODY)
    assert [row["worker"] for row in (await response.get_json())["rollout"]["workers"]] == [B]
    await until(api, "succeeded")
    no_match = await api.client().post(f"{PATH}?selector=model=zzz", json=BODY)
    assert (await no_match.get_json())["error"]["code"] == "no_workers_match"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", PATH), ("POST", PATH)]
    + [("POST", f"{PATH}/{step}") for step in ("pause", "resume", "cancel")],
)
async def test_each_rollout_route_needs_the_key(tmp_path, method, path):
    api = build_api(entry(A), key="k", folder=tmp_path / "weights")
    response = await api.client().open(path, method=method)
    assert response.status_code == 401
    headers = {"authorization": "Bearer k"}
    response = await api.client().open(path, method=method, headers=headers, json={})
    assert response.status_code != 401


async def test_a_followed_rollout_ends_when_the_proxy_drains(api, engines, autojump_clock):
    engines.gate = trio.Event()
    await api.client().post(PATH, json=BODY)
    api.data_plane.draining = True
    response = await api.client().get(f"{PATH}?follow=true")
    assert events_in(await response.get_data())[-1]["state"] == "running"


async def test_a_rollout_with_an_invalid_follow_does_not_start(api):
    response = await api.client().post(f"{PATH}?follow=maybe", json=BODY)
    assert response.status_code == 400
    assert api.operations.rollouts.progress.to_dict() is None
