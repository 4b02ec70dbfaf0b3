"""A trainer's long calls are ended by no timeout of HTTP, the data plane or health probes, and
bodies of many megabytes are forwarded."""

import json

import trio

from tests.promises.support.engines import engines
from tests.promises.support.fleet_program import program, record, toml
from tests.promises.support.sync_program import COMPLETE, DESTROY, INIT, PREPARE, init_body
from tests.weight_sync.trainer_fixture import UPDATE, open_trainer_store

# Each of these timeouts is shorter than the calls in these tests.
SHORT_TIMEOUTS = """\
request_timeout_secs = 0.3
queue_timeout_secs = 0.3
[admin]
worker_timeout_secs = 0.3
"""
LONG_SECS = 1.0
READY = "/ready"
PROBE_READY = f'[health]\nendpoint = "{READY}"'
NAME_BYTES = 9_000


async def test_a_long_call_has_only_its_own_timeout_and_does_not_affect_health(
    tmp_path,
):
    file = tmp_path / "proxy.toml"
    with trio.fail_after(60):
        async with engines(2) as workers, open_trainer_store() as store:
            file.write_text(toml(workers, more=SHORT_TIMEOUTS).replace("[health]", PROBE_READY))
            async with program("--config", file) as running:
                await running.until_routable(*workers)
                bucket = {"names": ["a"], "dtypes": ["uint8"], "shapes": [[1]]}
                for path, body in (
                    (INIT, init_body(store.port, 3, "steps")),
                    (PREPARE, {"num_buckets": 1, "buckets": [bucket]}),
                    (COMPLETE, {"weight_version": "v1"}),
                    (UPDATE, {**bucket, "weight_version": "v2"}),
                ):
                    response = await call_slowly(
                        running, workers, path, {"group_name": "steps", **body}
                    )
                    assert response["success"], response
                response = await running.client.post(DESTROY, json={"group_name": "steps"})
                assert response.status_code == 200, response.text
                for path in (INIT, PREPARE, COMPLETE, UPDATE):
                    assert {len(worker.paths(path)) for worker in workers} == {1}, path
                assert (await running.get_json("/weights"))["weight_epoch"] == 2


async def call_slowly(running, workers, path, body):
    """Calls engines that are slow and answer probes with 503; returns the proxy's response."""
    responses = []

    async def ask():
        responses.append(await running.client.post(path, json=body))

    async with trio.open_nursery() as nursery:
        for worker in workers:
            worker.wait_at(path)
        nursery.start_soon(ask)
        for worker in workers:
            await worker.asked[path].wait()
            worker.responses[READY] = (503, {"status": "busy"})
        probes_before = [len(worker.paths(READY)) for worker in workers]
        await trio.sleep(LONG_SECS)
        with trio.fail_after(30):
            while any(
                len(worker.paths(READY)) < count + 4
                for worker, count in zip(workers, probes_before, strict=True)
            ):
                await trio.sleep(0.02)
        listed = await running.get_json("/workers")
        for worker in workers:
            assert record(listed, worker)["health_state"] == "healthy", path
            del worker.responses[READY]
            worker.gates.pop(path).set()
    return responses[0].json()


def prepare_body(count, **fields):
    """Returns the body for `count` tensors with long names."""
    bucket = {
        "names": [f"{number}." + "x" * NAME_BYTES for number in range(count)],
        "dtypes": ["bfloat16"] * count,
        "shapes": [[1]] * count,
    }
    return {"group_name": "steps", "num_buckets": 1, "buckets": [bucket], **fields}


async def test_a_prepare_of_many_megabytes_is_forwarded_unchanged(tmp_path):
    file = tmp_path / "proxy.toml"
    with trio.fail_after(60):
        async with engines(1) as (engine,), open_trainer_store() as store:
            file.write_text(toml([engine]))
            async with program("--config", file) as running:
                await running.until_routable(engine)
                response = await running.client.post(INIT, json=init_body(store.port, 2, "steps"))
                assert response.status_code == 200, response.text
                # The proxy rejects it, so that the fake engine need not parse it.
                raw = json.dumps(prepare_body(7_300, num_buckets=2)).encode()
                assert 62 << 20 < len(raw) < 64 << 20
                response = await running.client.post(PREPARE, content=raw)
                assert response.status_code == 400, response.text[:1000]
                assert "num_buckets" in response.json()["message"]
                body = prepare_body(2_000)
                response = await running.client.post(PREPARE, json=body)
                assert response.status_code == 200, response.text[:1000]
                assert [received for path, received in engine.calls if path == PREPARE] == [body]
