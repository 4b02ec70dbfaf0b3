"""An upgrade of the only picker: no request of Envoy's fails, and the counts are kept."""

import os
import signal

import trio

from omni_proxy.picker.client import AsyncWorkerPicker
from tests.promises.support.envoy_program import idle, needs_envoy, picked
from tests.promises.support.fleet_program import chat
from tests.promises.upgrade.test_upgrade import until_gone, upgrade

pytestmark = needs_envoy
CLIENTS = 8


async def test_an_upgrade_of_the_picker_refuses_no_request_and_cuts_no_stream(tmp_path):
    async with picked(tmp_path, more="[routing]\npolicy = 'least_request'") as here:
        picker, statuses, stop, lines = here.picker, [], trio.Event(), []
        client = AsyncWorkerPicker(str(picker.client.base_url))
        held = await client.acquire()
        gate = trio.Event()

        async def keep_asking():
            while not stop.is_set():
                answer = await here.client.post("/v1/chat/completions", json=chat())
                statuses.append(answer.status_code)

        async def read_stream():
            body = chat(stream=True)
            async with here.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines.extend([line async for line in answer.aiter_lines() if line])

        other = next(worker for worker in here.fleet if worker.url != held.url)
        # The stream goes to this worker, which has fewer requests in flight.
        other.gate, opened = gate, other.gate
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_stream)
            await other.halfway.wait()
            other.gate = opened
            for _ in range(CLIENTS):
                nursery.start_soon(keep_asking)
            report = await upgrade(picker)
            assert report.outcome == "done", report
            before = len(statuses)
            while len(statuses) < before + 10 * CLIENTS:
                await trio.sleep(0.01)
            stop.set()
            body = await picker.until("/status", lambda body: body["pid"] == report.pid)
            assert body["picker"]["reservations"] == 1
            assert picker.process.returncode is None
            gate.set()
        assert set(statuses) == {200}
        assert lines[-1] == "data: [DONE]"
        workers = (await picker.get_json("/workers"))["workers"]
        assert [row["in_flight"] for row in workers if row["url"] == held.url] == [1]
        assert await client.release(held)
        assert not await client.release(held)
        await idle(picker)
        await client.close()
        os.kill(report.pid, signal.SIGTERM)
        await until_gone(report.pid)
