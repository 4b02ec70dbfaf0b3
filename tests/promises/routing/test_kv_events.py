"""Prompts of token ids go to the worker whose KV events show that it has them cached."""

import pytest
import trio

from tests.promises.support.fleet_program import (
    PATIENCE_SECS,
    PROBES,
    program,
    put,
    record,
    workers,
)

pytest.importorskip("zmq")
from tests.kv_events.publisher import CLEARED, publishers, stored

PROMPT = list(range(100, 140))
OTHER = list(range(500, 540))


def config(fleet, events, *, processes=1):
    entries = "".join(
        f'[[workers]]\nurl = "{worker.url}"\nkv_events = "{publisher.endpoint}"\n'
        f'kv_replay = "{publisher.replay_endpoint}"\n'
        for worker, publisher in zip(fleet, events, strict=True)
    )
    return (
        f"[server]\nport = 0\nprocesses = {processes}\n{PROBES}[routing]\n"
        f'policy = "cache_aware"\n[routing.cache_aware]\nsource = "events"\n{entries}'
    )


def modes(body):
    return [worker["kv_mode"] for worker in body["workers"]]


async def ask(running, prompt):
    return (await running.client.post("/v1/completions", json={"prompt": prompt})).json()["worker"]


async def metric(running, name):
    text = (await running.client.get("/metrics")).text
    return next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name))


async def until_blocks(running, count):
    with trio.fail_after(PATIENCE_SECS):
        while (seen := float(await metric(running, "omni_proxy_kv_index_blocks"))) != count:
            assert seen <= 20
            await trio.sleep(0.02)


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_prompt_of_token_ids_goes_to_the_worker_with_its_blocks(tmp_path, processes):
    with publishers(True, False) as events:
        first, second = events
        first.publish(stored(OTHER))
        async with workers("a", "b") as fleet:
            file = tmp_path / "omni.toml"
            put(file, config(fleet, events, processes=processes))
            async with program("--config", file) as running:
                await running.until_routable(*fleet)
                body = await running.until("/workers", lambda body: modes(body)[0] == "exact")
                assert modes(body) == ["exact", "inferred"]
                second.publish(CLEARED, stored(PROMPT))
                await running.until("/workers", lambda body: modes(body) == ["exact", "exact"])
                await until_blocks(running, 20)
                for _ in range(3):
                    assert await ask(running, [*PROMPT, 1, 2, 3]) == "b"
                    assert await ask(running, [*OTHER, 1, 2, 3]) == "a"
                # A gap makes a worker degraded, unless a replay fills it.
                second.publish(lost=True)
                first.publish(CLEARED, lost=True)
                for publisher in events:
                    publisher.publish(stored([7] * 4))
                body = await running.until(
                    "/workers", lambda body: modes(body) == ["exact", "degraded"]
                )
                assert "batches 1 to 1 were lost" in record(body, fleet[1])["kv_reason"]
                await until_blocks(running, 1)
                label = f'{{mode="exact",worker="{fleet[0].url}"}}'
                assert await metric(running, f"omni_proxy_worker_kv_mode{label}") == "1.0"
