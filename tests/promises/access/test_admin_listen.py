"""[admin] listen: control requests have their own listener and are served only there."""

import os
import socket
import stat
from contextlib import asynccontextmanager

import httpx
import pytest
import trio

from tests.promises.support.fleet_program import PATIENCE_SECS, program, put, toml, urls, workers

pytestmark = pytest.mark.usefixtures("soon")
KEY = "s3cret"
ON_BOTH_LISTENERS = (
    "/live",
    "/ready",
    "/health",
    "/workers",
    "/v1/models",
    "/metrics",
    "/openapi.json",
)
ON_ADMIN_LISTENER_ONLY = {
    "GET": ("/status", "/config", "/weights", "/feed"),
    "POST": ("/workers", "/reload", "/pause_generation", "/update_weights_from_disk", "/explain"),
    "PUT": ("/workers/x",),
    "DELETE": ("/workers/x",),
}


def config(fleet, *, listen="127.0.0.1:0", key="", listen_key=True):
    more = f"[admin]\nlisten = '{listen}'\nlisten_key = {str(listen_key).lower()}\n"
    return toml(fleet, more=f"{more}api_key = '{key}'\nopen_metrics = true\n")


@asynccontextmanager
async def client_at(address):
    transport = httpx.AsyncHTTPTransport(uds=address[5:]) if address.startswith("unix:") else None
    base = "http://localhost" if transport else f"http://{address}"
    async with httpx.AsyncClient(
        base_url=base, transport=transport, timeout=PATIENCE_SECS, trust_env=False
    ) as client:
        yield client


async def admin_address(running):
    match = await running.until_logged(r"listener_opened url=(\S+) purpose=admin")
    return match[1].removeprefix("http://")


@asynccontextmanager
async def running_server(tmp_path, **keys):
    """Yields the program, its worker, a client of the admin listener, and its file."""
    file = tmp_path / "proxy.toml"
    async with workers("w") as fleet:
        file.write_text(config(fleet, **keys))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            async with client_at(await admin_address(running)) as admin:
                yield running, fleet[0], admin, file


async def test_control_routes_are_only_on_the_admin_listener_and_health_on_both(tmp_path):
    async with running_server(tmp_path) as (running, worker, admin, _):
        for path in ON_BOTH_LISTENERS:
            assert (await running.client.get(path)).status_code in (200, 502), path
            assert (await admin.get(path)).status_code in (200, 502), path
        for method, paths in ON_ADMIN_LISTENER_ONLY.items():
            for path in paths:
                answer = await running.client.request(method, path)
                assert answer.status_code == 403, path
                assert answer.json()["error"]["code"] == "admin_listener_only"
                assert "[admin] listen" in answer.json()["detail"]
        body = (await running.client.post("/pause_generation")).json()
        assert (body["success"], body["status"]) == (False, "error")
        assert (await admin.get("/status")).status_code == 200
        added = await admin.post("/workers", json={"url": "http://127.0.0.1:1"})
        assert added.status_code == 200
        assert urls(await running.get_json("/workers")) == [worker.url, "http://127.0.0.1:1"]
        assert (await admin.post("/reload")).status_code == 200


async def test_model_routes_are_not_on_the_admin_listener(tmp_path):
    async with running_server(tmp_path) as (running, worker, admin, _):
        assert (await running.ask()).status_code == 200
        answer = await admin.post("/v1/chat/completions", json={"messages": []})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "admin_listener"
        assert (await admin.get("/v1/audio/speech/stream")).status_code == 404
        assert (await admin.get("/nowhere")).status_code == 404
        assert worker.requests == 1


async def test_no_client_can_claim_the_admin_listener(tmp_path):
    async with running_server(tmp_path) as (running, _, _, _):
        url = running.client.base_url
        for host in ("admin", "Admin", "admin:80", "front"):
            for fields in ({"Host": host}, {"Host": "x", "X-Forwarded-Host": host}):
                answer = await running.client.post("/reload", headers=fields)
                assert answer.status_code == 403
            stream = await trio.open_tcp_stream(url.host, url.port)
            async with stream:
                line = f"POST http://{host}/reload HTTP/1.1\r\nhost: {host}\r\n"
                await stream.send_all(f"{line}content-length: 0\r\n\r\n".encode())
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 403 ")


async def test_the_admin_listener_requires_the_key_unless_configured_otherwise(tmp_path):
    key = {"Authorization": f"Bearer {KEY}"}
    async with running_server(tmp_path, key=KEY) as (running, worker, admin, file):
        assert (await admin.post("/reload")).status_code == 401
        assert (await admin.post("/reload", headers=key)).status_code == 200
        assert (await running.client.post("/reload", headers=key)).status_code == 403
        without_listen_key = config([worker], key=KEY, listen_key=False)
        put(file, without_listen_key)
        await running.until_logged("revision=2")
        assert (await admin.post("/reload")).status_code == 200
        assert "workers" in (await admin.get("/health")).json()
        assert "workers" not in (await running.client.get("/health")).json()
        assert (await running.client.post("/reload", headers=key)).status_code == 403


async def test_a_reload_opens_and_closes_the_admin_listener(tmp_path):
    file, path = tmp_path / "proxy.toml", tmp_path / "admin.sock"
    async with workers("w") as fleet:
        file.write_text(toml(fleet))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            assert (await running.client.post("/reload")).status_code == 200
            put(file, config(fleet, listen=f"unix:{path}"))
            assert await admin_address(running) == f"unix:{path}"
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
            assert (await running.client.post("/reload")).status_code == 403
            async with client_at(f"unix:{path}") as admin:
                listeners = (await admin.get("/status")).json()["listeners"]
                assert listeners[1:] == [f"unix:{path}"]
                put(file, toml(fleet))
                while path.exists():
                    await trio.sleep(0.01)
            assert (await running.client.post("/reload")).status_code == 200


async def test_an_address_in_use_is_refused_and_named(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("w") as fleet:
        file.write_text(toml(fleet))
        async with program("--config", file) as running:
            with socket.create_server(("127.0.0.1", 0)) as other:
                taken = f"127.0.0.1:{other.getsockname()[1]}"
                put(file, config(fleet, listen=taken))
                message = rf"admin\.listen: cannot listen on {taken}: Address already in use"
                await running.until_logged(message)
                assert (await running.client.post("/reload")).status_code == 422
