"""The proxy follows the KV events of replicas that it launches."""

import httpx
import pytest
import trio

from tests.ports import free_run
from tests.promises.support.fleet_program import PATIENCE_SECS, PROBES, program, put

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("zmq")

REPLICA = (
    '["omni-proxy", "replica", "--model", "tiny", "--port", "{port}", '
    '"--kv-events", "tcp://*:{%d+index}", "--kv-replay", "tcp://*:0"]'
)


def config(base_port):
    """A file for one replica at this port, whose events are at the next port."""
    return (
        f'[server]\nport = 0\n{PROBES}[routing]\npolicy = "cache_aware"\n'
        '[routing.cache_aware]\nsource = "events"\n'
        f'[[launch]]\nbase_port = {base_port}\nkv_events = "auto"\n'
        f"command = {REPLICA % (base_port + 1)}\n"
    )


async def until_blocks(running, count):
    with trio.fail_after(PATIENCE_SECS):
        while f"\nomni_proxy_kv_index_blocks {count}.0\n" not in (
            text := (await running.client.get("/metrics")).text
        ):
            assert "omni_proxy_kv_index_blocks" in text
            await trio.sleep(0.02)


async def test_the_kv_events_of_a_launched_replica_are_followed(tmp_path):
    put(tmp_path / "proxy.toml", config(free_run(2)))
    request = {"prompt": list(range(300, 360)), "max_tokens": 1}
    async with program("--config", tmp_path / "proxy.toml") as running:
        body = await running.until(
            "/workers", lambda body: [row["kv_mode"] for row in body["workers"]] == ["exact"]
        )
        async with httpx.AsyncClient(timeout=PATIENCE_SECS, verify=False) as client:
            # Not through the proxy, which learns of the prompt by its events only.
            url = f"{body['workers'][0]['url']}/v1/completions"
            assert (await client.post(url, json=request)).status_code == 200
        await until_blocks(running, 3)
