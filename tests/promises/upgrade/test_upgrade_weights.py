"""Alternating upgrades and weight updates under traffic: each response has its weight version."""

import os
import signal

import pytest
import trio

from tests.promises.support.fleet_program import program, put, toml
from tests.promises.upgrade.test_upgrade import until_gone, upgrade
from tools.bench.cluster.weights import UPDATE, Traffic, workers

pytestmark = pytest.mark.usefixtures("soon")
ROUNDS = int(os.environ.get("OMNI_TESTS_UPGRADES", "3"))
SYNC = "[weight_sync]\nmode = 'off'\nverify = 'off'\ndrain_secs = 5\n"


@pytest.mark.parametrize("more", ["", "processes = 2\n"], ids=["one", "processes"])
async def test_an_update_right_after_an_upgrade_is_done_and_no_response_is_mixed(tmp_path, more):
    file = tmp_path / "proxy.toml"
    async with workers(2) as fleet:
        put(file, toml(fleet, more=f"{more}queue_size = 100\n") + SYNC)
        async with program("--config", file) as running:
            pid = running.process.pid
            await running.until_routable(*fleet)
            await running.until("/workers", lambda body: versions(body) == {"v0"})
            traffic = Traffic([running.client.base_url.port])
            running.client.headers["connection"] = "close"
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(traffic.run, 9)
                    for number in range(1, ROUNDS + 1):
                        done = await upgrade(running)
                        assert done.outcome == "done", done
                        pid = done.pid
                        body = {"model_path": "m", "weight_version": f"v{number}"}
                        reply = await running.client.post(UPDATE, json=body)
                        assert (reply.status_code, reply.json()["weight_epoch"]) == (200, number)
                        target = traffic.answered + 20
                        while traffic.answered < target:
                            await trio.sleep(0.01)
                    assert versions(await running.get_json("/workers")) == {f"v{ROUNDS}"}
                    nursery.cancel_scope.cancel()
            finally:
                os.kill(pid, signal.SIGTERM)
                await until_gone(pid)
            assert traffic.failures == []
            assert traffic.wrong_heads == []
            assert sum(worker.mixed for worker in fleet) == 0


def versions(body) -> set[str]:
    return {row["weight_version"] for row in body["workers"]}
