import json

import pytest
import trio

from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.admin_api.fake_engines import Engines

PATH = "/weights/rollout"
BODY = {"model_path": "/m", "weight_version": "v2"}


class LoadingEngines(Engines):
    """They take every call; what they report is what they loaded."""

    def __init__(self):
        super().__init__()
        self.labels = {A: "v1", B: "v1"}
        self.gate = trio.Event()
        self.gate.set()

    async def answer(self, request):
        url = str(request.url.copy_with(raw_path=b"/")).rstrip("/")
        path = request.url.path
        if path == "/update_weights_from_disk":
            await self.gate.wait()
            self.labels[url] = json.loads(request.content)["weight_version"]
        reported = {"weight_version": self.labels[url], "model_path": "/m/v1", "success": True}
        self.set_reply(url, path, reported)
        return await super().answer(request)


@pytest.fixture
def engines(monkeypatch):
    return LoadingEngines().install(monkeypatch)


@pytest.fixture
async def api(engines, tmp_path, nursery):
    made = build_api(entry(A), entry(B), folder=tmp_path / "weights")
    made.healthy(A, B)
    await nursery.start(made.operations.run)
    return made


def events_in(raw):
    lines = [line for line in raw.decode().splitlines() if line.startswith("data:")]
    return [json.loads(line.removeprefix("data:")) for line in lines]


async def until(api, state):
    progress = api.operations.rollouts.progress
    with trio.fail_after(30):
        while (progress.to_dict() or {}).get("state") != state:
            await progress.changed.wait()


async def test_without_one_its_state_is_none(api):
    answer = await api.client().get(PATH)
    reported = {"id": None, "state": "none", "workers": []}
    assert (answer.status_code, await answer.get_json()) == (200, reported)
    answer = await api.client().get(f"{PATH}?follow=true")
    assert events_in(await answer.get_data()) == [reported]


async def test_it_is_accepted_with_a_location_and_seen_there_and_at_weights(api):
    answer = await api.client().post(PATH, json=BODY)
    assert (answer.status_code, answer.headers["location"]) == (202, PATH)
    body = await answer.get_json()
    assert (body["success"], body["rollout"]["state"], body["rollout"]["total"]) == (
        True, "running", 2,
    )  # fmt: skip
    await until(api, "succeeded")
    seen = await (await api.client().get(PATH)).get_json()
    assert (seen["state"], seen["updated"], seen["id"]) == ("succeeded", 2, body["rollout"]["id"])
    assert (await (await api.client().get("/weights")).get_json())["rollout"] == seen
    feed = json.loads(await (await api.client().get("/feed?once=true")).get_data())
    assert feed["weights"]["rollout"]["id"] == seen["id"]


@pytest.mark.parametrize(
    ("path", "headers"), [(PATH, {"accept": "text/event-stream"}), (f"{PATH}?follow=true", {})]
)
async def test_with_events_the_answer_lasts_until_its_end(api, path, headers):
    answer = await api.client().post(path, json=BODY, headers=headers)
    assert (answer.status_code, answer.content_type) == (200, "text/event-stream")
    events = events_in(await answer.get_data())
    assert (events[0]["state"], events[-1]["state"]) == ("running", "succeeded")
    assert events[-1]["updated"] == 2


async def test_pause_resume_and_cancel(api, engines):
    engines.gate = trio.Event()
    for step in ("pause", "resume", "cancel"):
        answer = await api.client().post(f"{PATH}/{step}")
        body = await answer.get_json()
        assert (answer.status_code, body["error"]["code"], body["success"]) == (
            409, "no_rollout", False,
        )  # fmt: skip
    await api.client().post(PATH, json=BODY)
    answer = await api.client().post(f"{PATH}/pause")
    assert (await answer.get_json())["rollout"]["state"] in ("paused", "pausing")
    engines.gate.set()
    await until(api, "paused")
    assert (await api.client().post(f"{PATH}/resume")).status_code == 200
    await until(api, "succeeded")
    await api.client().post(PATH, json={**BODY, "weight_version": "v3", "pause_after_canary": True})
    await until(api, "paused")
    answer = await api.client().post(f"{PATH}/cancel", headers={"user-agent": "me"})
    assert (await answer.get_json())["rollout"]["cause"] == "cancelled by me"
    await until(api, "cancelled")


async def test_a_selector_narrows_it(api):
    answer = await api.client().post(f"{PATH}?selector=url={B}", json=BODY)
    assert [row["worker"] for row in (await answer.get_json())["rollout"]["workers"]] == [B]
    await until(api, "succeeded")
    nobody = await api.client().post(f"{PATH}?selector=model=zzz", json=BODY)
    assert (await nobody.get_json())["error"]["code"] == "no_workers_match"


async def test_all_of_it_needs_the_key(tmp_path):
    api = build_api(entry(A), key="k", folder=tmp_path / "weights")
    for method, path in (("get", PATH), ("post", PATH), ("post", f"{PATH}/cancel")):
        assert (await getattr(api.client(), method)(path)).status_code == 401
    given = {"authorization": "Bearer k"}
    assert (await api.client().get(PATH, headers=given)).status_code == 200


async def test_a_reader_ends_when_the_proxy_leaves(api, engines, autojump_clock):
    engines.gate = trio.Event()
    await api.client().post(PATH, json=BODY)
    api.data_plane.draining = True
    answer = await api.client().get(f"{PATH}?follow=true")
    assert events_in(await answer.get_data())[-1]["state"] == "running"
