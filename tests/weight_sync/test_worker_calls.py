import json
import math

import httpx
import trio

from omni_proxy.config.schema import WorkerEntry
from omni_proxy.upstream_http import client
from omni_proxy.upstream_http.client import Call
from omni_proxy.weight_sync.worker_calls import (
    call_all,
    limit_secs,
    read_labels,
    verify_checksums,
)
from tests.admin_api.api_fixture import A, B, build_api
from tests.weight_sync.operation_fixture import LOST, api_with


async def test_all_workers_are_called_before_any_of_them_responds(monkeypatch):
    count = 150
    called, all_called = [], trio.Event()

    async def respond_together(request):
        called.append(request.url.port)
        if len(called) == count:
            all_called.set()
        await all_called.wait()

        async def pieces():
            yield json.dumps({"port": request.url.port}).encode()

        return httpx.Response(200, content=pieces())

    monkeypatch.setattr(
        client,
        "open_client",
        lambda worker: httpx.AsyncClient(transport=httpx.MockTransport(respond_together)),
    )
    entries = [WorkerEntry(url=f"http://127.0.0.1:{9000 + at}") for at in range(count)]
    workers = build_api(*entries).fleet.workers
    reported = []
    with trio.fail_after(30):
        returned = await call_all(workers, Call("POST", "/x", timeout_secs=15), reported.append)
    assert [result.worker for result in returned] == [worker.url for worker in workers]
    assert [result.body["port"] for result in returned] == [9000 + at for at in range(count)]
    assert sorted(result.worker for result in reported) == sorted(worker.url for worker in workers)


def test_a_configured_timeout_of_zero_is_no_limit():
    assert (limit_secs(0), limit_secs(5)) == (math.inf, 5)


async def test_the_label_is_read_from_a_second_path_if_the_first_fails(engines, folder):
    api = api_with(folder)
    engines.set_reply(A, "/model_info", {"detail": "key"}, status=401)
    engines.set_reply(A, "/get_model_info", {"weight_version": "v9"})
    labels = await read_labels(api.fleet.workers, {"authorization": "Bearer t"})
    assert {worker.url: label for worker, label in labels.items()} == {A: "v9", B: "v1"}
    assert engines.paths(B) == ["/model_info"]
    assert {request.headers["authorization"] for request in engines.requests} == {"Bearer t"}


async def test_a_worker_that_is_lost_or_reports_several_labels_has_no_label(engines, folder):
    api = api_with(folder)
    engines.replies[A, "/model_info"] = LOST
    stages = [{"data": {"weight_version": label}} for label in ("v1", "v2")]
    engines.set_reply(B, "/model_info", {"results": stages})
    labels = await read_labels(api.fleet.workers, {})
    assert list(labels.values()) == [None, None]
    assert engines.paths(A) == ["/model_info"]


async def test_checksums_are_requested_as_specified(engines, folder):
    api = api_with(folder)
    verdict = await verify_checksums(api.fleet.workers, {}, 5.0)
    assert (verdict.checked, verdict.checksums) == ((A, B), {A: "s", B: "s"})
    for request in engines.requests:
        assert (request.method, request.url.path) == ("POST", "/weights_checker")
        assert request.content == b'{"action": "checksum"}'
        assert request.headers["content-type"] == "application/json"


async def test_the_label_of_vllm_is_read_from_weight_info(engines, folder):
    api = api_with(folder)
    for path in ("/model_info", "/get_model_info"):
        engines.set_reply(A, path, {}, status=404)
    engines.set_reply(A, "/weight_info", {"weight_version": "step-7"})
    labels = await read_labels(api.fleet.workers, {})
    assert list(labels.values()) == ["step-7", "v1"]
