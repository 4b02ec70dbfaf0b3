"""Admin keys with roles against the real program, and the audit line that each change writes.

Without a key, requests with a rebound host name (DNS rebinding) are refused on real sockets.
"""

import json
from functools import partial
from hashlib import sha256

import pytest
import trio

from tests.promises.support.fleet_program import (
    PATIENCE_SECS,
    program,
    put,
    starting,
    toml,
    workers,
)

pytestmark = pytest.mark.usefixtures("soon")
KEY = "s3cret"


async def until_lines(file, count):
    with trio.fail_after(PATIENCE_SECS):
        while True:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            await trio.sleep(0.02)


ROLES = """
[admin]
audit_log = '{audit}'
[[admin.keys]]
name = "grafana"
key_env = "GRAFANA_KEY"
[[admin.keys]]
name = "deployer"
key_file = "{key_file}"
role = "operate"
[[admin.keys]]
name = "trainer"
key_sha256 = "{digest}"
role = "weights"
"""


WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
UNUSUAL_REQUESTS = (
    (b"/feed", WEBSOCKET), (b"/status", WEBSOCKET), (b"//status", b""), (b"/%73tatus", b""),
    (b"/status", b"X-Omni-Received: unix http admin\r\n"), (b"/status", b"X-Api-Key: read-me\r\n"),
    (b"/status", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
     b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"),
)  # fmt: skip


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_admin_keys_have_roles_and_a_key_file_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFANA_KEY", "read-me")
    file, key_file, audit = (tmp_path / name for name in ("proxy.toml", "key", "audit.jsonl"))
    key_file.write_text("deploy-1\n")
    digest = sha256(b"train").hexdigest()
    roles = ROLES.format(audit=audit, key_file=key_file, digest=digest)
    async with workers("w") as fleet:
        put(file, toml(fleet, more=roles))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)

            async def status(method, path, key):
                answer = await running.client.request(method, path, headers=bearer(key), json={})
                return answer.status_code

            for path in ("/config", "/status", "/metrics", "/weights", "/feed?once=1"):
                for key in ("read-me", "deploy-1", "train"):
                    assert await status("GET", path, key) == 200
            assert await status("POST", "/explain", "read-me") == 200
            assert await status("POST", "/reload", "read-me") == 403
            assert await status("POST", "/reload", "deploy-1") == 200
            assert await status("POST", "/continue_generation", "deploy-1") == 403
            assert await status("POST", "/continue_generation", "train") == 200
            assert await status("POST", "/pause_generation", "train") == 200
            paused = (await running.client.get("/status", headers=bearer("read-me"))).json()
            assert {pause["by"].partition(" (")[0] for pause in paused["paused"].values()} == {
                "trainer"
            }
            assert await status("POST", "/continue_generation", "train") == 200
            assert await status("POST", "/workers", "train") == 403
            assert await status("GET", "/v1/rl/engine/pause?selector=a%3Db", "read-me") == 403
            assert (await running.ask()).status_code == 200  # models need no key
            base = running.client.base_url
            for target, upgrade in UNUSUAL_REQUESTS:
                async with await trio.open_tcp_stream(base.host, base.port) as stream:
                    head = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n%b\r\n"
                    await stream.send_all(head % (target, upgrade))
                    assert (await stream.receive_some()).startswith(b"HTTP/1.1 401 "), target
            lines = await until_lines(audit, 8)
            assert [(line["who"], line["status"]) for line in lines] == [
                ("grafana", 403), ("deployer", 200), ("deployer", 403), ("trainer", 200),
                ("trainer", 200), ("trainer", 200), ("trainer", 403), ("grafana", 403),
            ]  # fmt: skip

            put(key_file, "deploy-2")
            await running.until_logged("keys_reread table=admin.keys")
            assert await status("POST", "/reload", "deploy-1") == 403
            assert await status("POST", "/reload", "deploy-2") == 200
            visible = json.dumps(await running.get_json("/openapi.json")) + running.log
            visible += audit.read_text() + str((await running.client.get("/config")).json())
            for secret in ("read-me", "deploy-1", "deploy-2", digest):
                assert secret not in visible


async def test_a_key_that_cannot_be_read_prevents_the_start(tmp_path):
    file = tmp_path / "proxy.toml"
    put(file, '[server]\nport = 0\n[[admin.keys]]\nname = "a"\nkey_env = "OMNI_UNSET_KEY"\n')
    async with starting("--config", file) as running:
        with trio.fail_after(PATIENCE_SECS):
            assert await running.process.wait() == 2
        await running.until_logged(r"admin\.keys\[0\]\.key_env: names an environment variable")
        assert "listening" not in running.log


REBOUND = (
    b"GET /config HTTP/1.1\r\nHost: evil.example:30000\r\n\r\n",
    b"GET /status HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n",
    b"POST http://evil.example/reload HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n",
    b"POST /reload HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://evil.example\r\n"
    b"Content-Length: 0\r\n\r\n",
    b"POST /workers HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: null\r\n"
    b'Content-Type: text/plain\r\nContent-Length: 25\r\n\r\n{"url":"http://10.0.0.1"} ',
    b"GET /flush_cache HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: cross-site\r\n\r\n",
    b"GET /v1/rl/engine/sleep?selector=a!%3Db HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Referer: http://evil.example/\r\n\r\n",
)


async def test_without_a_key_a_rebound_host_name_reaches_no_control_route(tmp_path):
    file, audit = tmp_path / "proxy.toml", tmp_path / "audit.jsonl"
    async with workers("w") as fleet:
        put(file, toml(fleet, more=f"[admin]\naudit_log = '{audit}'\n"))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            base = running.client.base_url
            for request in REBOUND:
                async with await trio.open_tcp_stream(base.host, base.port) as stream:
                    await stream.send_all(request)
                    assert (await stream.receive_some()).startswith(b"HTTP/1.1 403 "), request
            assert fleet[0].requests == 0
            lines = await until_lines(audit, 5)
            assert {(line["who"], line["status"]) for line in lines} == {(None, 403)}
            # Requests of clients that are not browsers still work.
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            url = b'{"url": "http://127.0.0.1:9"}'
            for options in (
                {},
                {"content": b""},
                {"json": {}},
                {"content": b"{}", "headers": form},
            ):
                assert (await running.client.post("/reload", **options)).status_code == 200
            added = await running.client.post("/workers", content=url, headers=form)
            assert added.status_code == 200
            page = await running.client.get("/", headers={"Accept": "text/html,*/*"})
            assert (page.status_code, page.headers["location"]) == (302, "dashboard")


async def test_each_change_is_audited_across_disconnects_rotation_and_a_full_disk(tmp_path):
    file, audit = tmp_path / "proxy.toml", tmp_path / "logs" / "audit.jsonl"
    key = {"Authorization": f"Bearer {KEY}"}

    def config(target):
        return toml(fleet, more=f"[admin]\napi_key = '{KEY}'\naudit_log = '{target}'\n")

    async with workers("w") as fleet:
        put(file, config(audit))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            assert (await running.client.post("/reload?token=t0p", headers=key)).status_code == 200
            assert (await running.client.post("/reload")).status_code == 401
            await running.client.get("/config", headers=key)
            done, refused = await until_lines(audit, 2)
            assert (done["who"], done["status"]) == ("api_key", 200)
            assert done["path"] == "/reload?token=***"
            assert done["from"].startswith("127.0.0.1:")
            assert (refused["who"], refused["status"]) == (None, 401)

            # The caller disconnects while a worker has not answered yet.
            fleet[0].gate = trio.Event()
            async with trio.open_nursery() as nursery:
                pause = partial(running.client.post, "/pause_generation", json={}, headers=key)
                nursery.start_soon(pause)
                await fleet[0].halfway.wait()
                nursery.cancel_scope.cancel()
            *_, abandoned = await until_lines(audit, 3)
            assert (abandoned["path"], abandoned["status"]) == ("/pause_generation", None)
            fleet[0].gate.set()

            audit.rename(tmp_path / "rotated")
            assert (await running.client.post("/reload", headers=key)).status_code == 200
            assert len(await until_lines(audit, 1)) == 1

            put(file, config("/dev/full"))
            await running.until_logged("revision=2")
            assert (await running.client.post("/reload", headers=key)).status_code == 200
            await running.until_logged(
                "log_write_failed target=/dev/full .*No space left on device"
            )
            metrics = (await running.client.get("/metrics", headers=key)).text
            assert 'lines_lost_total{log="audit_log",reason="unwritable"} 1.0' in metrics
