import json
import math

import httpx
import trio

from omni_proxy.config.schema import WorkerEntry
from omni_proxy.upstream_http import client
from omni_proxy.upstream_http.client import Call
from omni_proxy.weight_sync.worker_calls import call_all, limit_secs
from tests.admin_api.house import build_house


async def test_all_workers_are_called_before_any_answers(monkeypatch):
    count = 150
    here, everybody = [], trio.Event()

    async def meet(request):
        here.append(request.url.port)
        if len(here) == count:
            everybody.set()
        await everybody.wait()

        async def pieces():
            yield json.dumps({"port": request.url.port}).encode()

        return httpx.Response(200, content=pieces())

    monkeypatch.setattr(
        client,
        "open_client",
        lambda worker: httpx.AsyncClient(transport=httpx.MockTransport(meet)),
    )
    entries = [WorkerEntry(url=f"http://127.0.0.1:{9000 + at}") for at in range(count)]
    workers = build_house(*entries).fleet.workers
    heard = []
    with trio.fail_after(30):
        answers = await call_all(workers, Call("POST", "/x", timeout_secs=15), heard.append)
    assert [answer.worker for answer in answers] == [worker.url for worker in workers]
    assert [answer.body["port"] for answer in answers] == [9000 + at for at in range(count)]
    assert sorted(each.worker for each in heard) == sorted(worker.url for worker in workers)


def test_a_configured_zero_is_no_limit():
    assert (limit_secs(0), limit_secs(5)) == (math.inf, 5)
