"""Profiles may be written below some folders only."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_proxy.replica.api.app import build_app
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang import profile_routes


class ProfilerClient:
    def __init__(self):
        self.starts = []

    def profiler_start(self, start):
        self.starts.append(start)


def served_app(**options):
    client = ProfilerClient()
    context = RouteContext(client=client, **options)
    app = build_app(context)
    profile_routes.mount(app, context)
    return SimpleNamespace(client=client, http=app.test_client())


async def post(served, path, **body):
    key = {"Authorization": "Bearer k"}
    return await served.http.post(path, json=body, headers=key)


@pytest.mark.parametrize("path", ["/etc/x", "/root/.ssh", "{root}/../elsewhere", "{root}/out/x"])
async def test_a_folder_outside_the_profile_root_is_refused(tmp_path, path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to("/etc")
    served = served_app(admin_api_key=None, profile_root=root)
    folder = path.format(root=root)
    response = await post(served, "/start_request_profile", event_dir=folder)
    assert response.status_code == 400
    assert "--profile-root" in (await response.get_json())["detail"]
    response = await post(served, "/start_profile", trace_path_template=f"{folder}/t")
    assert response.status_code == 400
    inside = str(root / "events")
    both = {"trace_path_template": f"{inside}/trace", "event_dir": folder}
    assert (await post(served, "/start_profile", **both)).status_code == 400
    assert served.client.starts == []
    assert (await post(served, "/start_request_profile", event_dir=inside)).status_code == 200
    assert served.client.starts[0].event_dir == inside


async def test_without_a_root_and_a_key_only_temporary_folders_are_allowed(monkeypatch, tmp_path):
    monkeypatch.delenv(profile_routes.FOLDER_VARIABLE, raising=False)
    served = served_app(admin_api_key=None)
    below = str(Path(tempfile.gettempdir(), "events"))
    assert (await post(served, "/start_request_profile", event_dir="/any")).status_code == 400
    assert (await post(served, "/start_request_profile", event_dir=below)).status_code == 200
    monkeypatch.setenv(profile_routes.FOLDER_VARIABLE, "/any")
    assert (await post(served, "/start_request_profile", event_dir="/any/x")).status_code == 200
    assert (await post(served, "/start_request_profile")).status_code == 200


async def test_with_a_key_any_folder_is_allowed():
    served = served_app(admin_api_key="k")
    assert (await post(served, "/start_request_profile", event_dir="/any")).status_code == 200


async def test_a_page_of_another_origin_starts_no_profile():
    served = served_app(admin_api_key=None)
    page = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    for path in ("/start_profile", "/start_request_profile", "/stop_profile"):
        response = await served.http.post(path, json={}, headers=page)
        assert response.status_code == 403


async def test_an_invalid_path_is_refused():
    response = await post(
        served_app(admin_api_key=None), "/start_request_profile", event_dir="a\0b"
    )
    assert response.status_code == 400
