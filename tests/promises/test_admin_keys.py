"""What changes the real program leaves a line that says who did it."""

import json
from functools import partial

import pytest
import trio

from tests.promises.fleet_program import PATIENCE_SECS, program, put, toml, workers

pytestmark = pytest.mark.usefixtures("soon")
KEY = "s3cret"


async def until_lines(file, count):
    with trio.fail_after(PATIENCE_SECS):
        while True:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            await trio.sleep(0.02)


async def test_each_change_is_on_disk_whatever_becomes_of_the_file(tmp_path):
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

            # The caller leaves while a worker takes its time.
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
            await running.says("revision=2")
            assert (await running.client.post("/reload", headers=key)).status_code == 200
            await running.says("cannot write to /dev/full: .*No space left on device")
            metrics = (await running.client.get("/metrics", headers=key)).text
            assert 'lines_lost_total{log="audit_log",reason="unwritable"} 1.0' in metrics
