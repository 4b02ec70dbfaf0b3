import json

import pytest
import trio

from omni_proxy.admin_api.routes.picker_routes import endpoint_of
from omni_proxy.config.parse import parse
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.picker.picker import Picker
from omni_proxy.picker.service import PickerService
from tests.admin_api.api_fixture import A, B, build_api, entry
from tools.http_requests import RequestReader

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def api():
    config, written = parse(""), []

    def services(fleet):
        plane = DataPlane(fleet, config, admin_socket="/nowhere", sources=Sources(lambda n: 0))
        picker = PickerService(Picker(plane.services), lambda: config)
        return {"write_audit": written.append, "picker": picker}

    api = build_api(entry(A, model="m"), entry(B, model="n"), services=services)
    api.healthy(A, B)
    api.written = written
    return api


async def post(api, path, body):
    response = await api.client().post(path, json=body)
    return response.status_code, await response.get_json()


async def test_a_reservation_counts_until_it_is_deleted(api):
    status, body = await post(api, "/select_and_reserve", {**CHAT, "selection_id": "a/b c"})
    worker = api.worker(A)
    assert (status, worker.in_flight) == (200, 1)
    assert body == {
        "reservation_id": "a/b c", "worker_id": worker.id, "endpoint": "127.0.0.1:8011",
        "url": A, "rank": None, "model": None, "lease_secs": 120.0,
    }  # fmt: skip
    response = await api.client().delete("/reservations/a%2Fb%20c")
    assert (response.status_code, await response.get_json()) == (
        200,
        {"reservation_id": "a/b c", "released": True},
    )
    assert worker.in_flight == 0
    assert (await api.client().delete("/reservations/a%2Fb%20c")).status_code == 404


async def test_a_selection_has_no_reservation(api):
    status, body = await post(api, "/select", CHAT)
    assert (status, body["url"], body["reservation_id"], body["lease_secs"]) == (200, A, None, None)
    assert api.worker(A).in_flight == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [({"model": "x"}, 404), ({"path": "/nowhere"}, 404), ({"lease_secs": -1}, 400)],
)
@pytest.mark.parametrize("path", ["/select", "/select_and_reserve"])
async def test_an_invalid_selection_is_refused(api, path, body, status):
    assert (await post(api, path, body))[0] == status


async def test_without_an_eligible_worker_the_503_is_immediate(api):
    api.worker(A).disabled = True
    api.fleet.cordon(api.worker(A), "test")
    status, body = await post(api, "/select_and_reserve", CHAT)
    assert status == 503
    assert body["error"]["message"].startswith("no eligible upstream")


async def test_selections_are_not_written_to_the_audit_log(api):
    await post(api, "/select_and_reserve", {**CHAT, "selection_id": "s"})
    await api.client().delete("/reservations/s")
    assert api.written == []


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://[::1]:8000", "[::1]:8000"),
        ("https://host.example", "host.example:443"),
        ("http://host.example", "host.example:80"),
        ("unix:/run/engine.sock", "/run/engine.sock"),
    ],
)
def test_an_endpoint_has_the_port_of_its_scheme(url, endpoint):
    assert endpoint_of(url) == endpoint


async def test_after_an_upgrade_selections_are_sent_to_the_new_program(api, nursery, tmp_path):
    path, requests = tmp_path / "admin.sock", []

    async def answer(stream):
        head, body = await RequestReader(stream).read()
        requests.append((head.split(b"\r\n")[0], body))
        await stream.send_all(b"HTTP/1.1 409 Conflict\r\ncontent-length: 2\r\n\r\n{}")

    sock = trio.socket.socket(trio.socket.AF_UNIX)
    await sock.bind(str(path))
    sock.listen()
    nursery.start_soon(trio.serve_listeners, answer, [trio.SocketListener(sock)])
    assert (await post(api, "/select_and_reserve", {**CHAT, "selection_id": "a"}))[0] == 200
    assert len(api.services.picker.hand_over(str(path))) == 1
    assert await post(api, "/select_and_reserve", CHAT) == (409, None)
    assert (await api.client().delete("/reservations/a%2Fb%25")).status_code == 409
    lines = [b"POST /select_and_reserve HTTP/1.1", b"DELETE /reservations/a%2Fb%25 HTTP/1.1"]
    assert [line for line, _ in requests] == lines
    assert json.loads(requests[0][1]) == CHAT
    assert api.worker(A).in_flight == 0
    nursery.cancel_scope.cancel()
    path.unlink()


async def test_a_new_program_that_has_ended_gets_a_503(api, tmp_path):
    api.services.picker.hand_over(str(tmp_path / "missing.sock"))
    status, body = await post(api, "/select_and_reserve", CHAT)
    assert (status, body["error"]["code"]) == (503, "picker_unavailable")
