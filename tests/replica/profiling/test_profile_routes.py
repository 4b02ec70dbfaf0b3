"""The folders below which profiles may be written."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_proxy.replica.api.app import build_app
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.profiling import profile_routes


class Started:
    def __init__(self):
        self.starts = []

    def profiler_start(self, start):
        self.starts.append(start)


def made(**options):
    client = Started()
    served = RouteContext(client=client, **options)
    app = build_app(served)
    profile_routes.mount(app, served)
    return SimpleNamespace(client=client, http=app.test_client())


async def ask(world, path, **body):
    key = {"Authorization": "Bearer k"}
    return await world.http.post(path, json=body, headers=key)


@pytest.mark.parametrize("where", ["/etc/x", "/root/.ssh", "{root}/../elsewhere", "{root}/out/x"])
async def test_nothing_is_written_elsewhere(tmp_path, where):
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to("/etc")
    world = made(admin_api_key=None, profile_root=root)
    folder = where.format(root=root)
    answer = await ask(world, "/start_request_profile", event_dir=folder)
    assert answer.status_code == 400
    assert "--profile-root" in (await answer.get_json())["detail"]
    answer = await ask(world, "/start_profile", trace_path_template=f"{folder}/t")
    assert answer.status_code == 400
    inside = str(root / "events")
    both = {"trace_path_template": f"{inside}/trace", "event_dir": folder}
    assert (await ask(world, "/start_profile", **both)).status_code == 400
    assert world.client.starts == []
    assert (await ask(world, "/start_request_profile", event_dir=inside)).status_code == 200
    assert world.client.starts[0].event_dir == inside


async def test_without_a_root_and_a_key_only_temporary_files(monkeypatch, tmp_path):
    monkeypatch.delenv(profile_routes.FOLDER_VARIABLE, raising=False)
    world = made(admin_api_key=None)
    below = str(Path(tempfile.gettempdir(), "events"))
    assert (await ask(world, "/start_request_profile", event_dir="/any")).status_code == 400
    assert (await ask(world, "/start_request_profile", event_dir=below)).status_code == 200
    monkeypatch.setenv(profile_routes.FOLDER_VARIABLE, "/any")
    assert (await ask(world, "/start_request_profile", event_dir="/any/x")).status_code == 200
    assert (await ask(world, "/start_request_profile")).status_code == 200


async def test_with_the_key_any_folder_is_allowed():
    world = made(admin_api_key="k")
    assert (await ask(world, "/start_request_profile", event_dir="/any")).status_code == 200


async def test_a_page_of_another_origin_starts_no_profile():
    world = made(admin_api_key=None)
    page = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    for path in ("/start_profile", "/start_request_profile", "/stop_profile"):
        answer = await world.http.post(path, json={}, headers=page)
        assert answer.status_code == 403


async def test_what_is_no_path_is_refused():
    answer = await ask(made(admin_api_key=None), "/start_request_profile", event_dir="a\0b")
    assert answer.status_code == 400
