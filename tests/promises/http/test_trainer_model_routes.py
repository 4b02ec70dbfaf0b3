"""Model routes that trainers and agents call are relayed unchanged; there is no catch-all route."""

import json

import httpx
import pytest
import trio

from tests.dataplane.loop_script import until
from tests.promises.support.clients import client_of, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    LAST_CHUNK,
    SSE_HEAD,
    FakeWorker,
    answering,
    chunk,
    counted,
    fake_workers,
)
from tests.promises.support.fleet_program import program, put
from tests.promises.support.processes_fixture import serving

PROBES = "[health]\ninterval_secs = 0.2\nsuccess_threshold = 1\n"
ROUTES = [
    "/inference/v1/generate", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize",
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/chat/completions/derender",
    "/v1/completions/derender", "/derender", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/responses", "/v1/rerank", "/rerank", "/v1/score", "/v1/classify", "/pooling",
    "/v1/images/generations",
]  # fmt: skip
BODY = b'{"model" : "m", "odd":  [1.50, null], "token_ids": [1,2], "x": "\\u00e9"}'


@pytest.mark.parametrize("path", ROUTES)
async def test_each_route_is_relayed_byte_for_byte(path):
    async with dataplane_and_client(answering(counted(b'{"a":  1}'))) as (opened, client):
        await client.send(post(BODY, path=f"{path}?beta=true"))
        response = await client.answer()
        assert (response.status, response.body) == (200, b'{"a":  1}')
        assert opened.workers[0].requests == [(f"POST {path}?beta=true HTTP/1.1", BODY)]


@pytest.mark.parametrize("path", ["/tokenizer", "/v1/messages/x", "/inference/v1/other", "/own"])
async def test_an_unknown_path_reaches_no_worker(path):
    async with dataplane_and_client(answering(counted(b"{}"))) as (opened, client):
        await client.send(post(BODY, path=path))
        assert (await client.answer()).status == 503  # there is no admin API in this test
        assert not opened.workers[0].requests


async def test_equal_token_ids_go_to_the_worker_that_has_them_cached():
    config = "[routing]\npolicy = 'cache_aware'\n"
    async with (
        fake_workers(*[answering(counted(b"{}"))] * 3) as workers,
        run_dataplane(*workers, config=config) as opened,
        opened.client() as client,
    ):
        for family in (b"1, 22, 333, 4444", b"9, 88, 777, 6666", b"5, 5, 5, 5"):
            for last in (b"1", b"2", b"3", b"4"):
                body = b'{"token_ids": [%b, %b], "sampling_params": {}}' % (family * 20, last)
                await client.send(post(body, path="/inference/v1/generate"))
                assert (await client.answer()).status == 200
            holders = [w for w in workers if any(family in body for _, body in w.requests)]
            assert len(holders) == 1


class Responder(FakeWorker):
    """A worker that stores responses. A streamed one waits in the middle for `gate`."""

    def __init__(self, name):
        super().__init__(self._answer)
        self.name, self.count = name, 0
        self.gate = trio.Event()
        self.received = []

    async def _answer(self, call):
        method, path, _ = call.line.split()
        if path != "/v1/responses":
            if path.startswith("/v1/"):  # the proxy itself reads the engine's model now and then
                self.received.append((method, path))
            await call.send(counted(json.dumps({"by": self.name}).encode()))
            return
        body = json.loads(call.body)
        self.count += 1
        response_id = f"resp_{self.name}{self.count}"
        self.received.append((response_id, body.get("previous_response_id")))
        if not body.get("stream"):
            await call.send(counted(json.dumps({"id": response_id, "by": self.name}).encode()))
            return
        created = {"type": "response.created", "response": {"id": response_id}}
        await call.send(SSE_HEAD)
        await call.send(chunk(f"event: response.created\ndata: {json.dumps(created)}\n\n".encode()))
        await self.gate.wait()
        await call.send(chunk(b"data: [DONE]\n\n"), LAST_CHUNK)


@pytest.fixture(params=[1, 2], ids=["one process", "two processes"])
async def responders(request, tmp_path, soon):
    """Runs the program with three such workers; each request uses a new connection."""
    workers, file = [Responder(name) for name in "abc"], tmp_path / "proxy.toml"
    async with trio.open_nursery() as nursery:
        for worker in workers:
            await nursery.start(worker.serve)
        entries = "".join(f'[[workers]]\nurl = "{worker.url}"\n' for worker in workers)
        put(file, f"[server]\nport = 0\nprocesses = {request.param}\n{PROBES}{entries}")
        async with program("--config", file) as running:
            running.client.headers["connection"] = "close"
            await running.until_routable(*workers)
            if request.param > 1:
                await running.until("/status", lambda body: serving(body, request.param))
            running.workers = {worker.name: worker for worker in workers}
            yield running
        nursery.cancel_scope.cancel()


async def test_a_stored_response_is_requested_from_its_worker(responders):
    for _ in range(12):
        response = await responders.client.post("/v1/responses", json={"input": "a"})
        response_id, owner = response.json()["id"], response.json()["by"]
        for method, path in (
            ("GET", f"/v1/responses/{response_id}"),
            ("POST", f"/v1/responses/{response_id}/cancel"),
            ("DELETE", f"/v1/responses/{response_id}"),
        ):
            body = (await responders.client.request(method, path)).json()
            assert body == {"by": owner}
            assert responders.workers[owner].received[-1] == (method, path)
        follow_up = {"input": "b", "previous_response_id": response_id}
        response = await responders.client.post("/v1/responses", json=follow_up)
        assert response.json()["by"] == owner
        assert responders.workers[owner].received[-1] == (response.json()["id"], response_id)


async def test_a_response_that_still_streams_can_be_cancelled(responders):
    address = responders.client.base_url.netloc.decode()
    for _ in range(4):
        async with client_of(address) as client:
            await client.send(post(b'{"input": "a", "stream": true}', path="/v1/responses"))
            event = await client.until(b"\n\n")
            response_id = json.loads(event.partition(b"data: ")[2])["response"]["id"]
            response = await responders.client.post(f"/v1/responses/{response_id}/cancel")
            assert response.json()["by"] == response_id[len("resp_")]
    for worker in responders.workers.values():
        worker.gate.set()


async def test_an_unknown_stored_response_is_requested_from_any_worker(responders):
    response = await responders.client.get("/v1/responses/resp_of_another_day")
    assert response.json()["by"] in responders.workers


async def test_a_head_request_for_the_root_gets_a_local_reply(responders):
    response = await responders.client.head("/")
    assert (response.status_code, response.content) == (200, b"")
    other_host = httpx.Headers({"host": "any.name.example"})
    assert (await responders.client.head("/", headers=other_host)).status_code == 200
    assert not any(("HEAD", "/") in worker.received for worker in responders.workers.values())


CONFIGURED_ROUTES = """
[[routes]]
path = "/skyrl/v1/generate"
text = ["token_ids", "extra.ids"]

[[control_routes]]
path = "/init_broadcaster"
kind = "group"

[[control_routes]]
path = "/liveness_of_engines"
kind = "read"
"""


@pytest.mark.parametrize("processes", [1, 2])
async def test_configured_routes_follow_the_file(tmp_path, soon, processes):
    file = tmp_path / "proxy.toml"
    async with fake_workers(*[answering(counted(b'{"success": true}'))] * 2) as workers:
        entries = "".join(f'[[workers]]\nurl = "{worker.url}"\n' for worker in workers)
        without_routes = f"[server]\nport = 0\nprocesses = {processes}\n{PROBES}{entries}"
        put(file, without_routes)

        def counts_of(path):
            return [sum(path in line for line, _ in worker.requests) for worker in workers]

        async with program("--config", file) as running:
            running.client.headers["connection"] = "close"
            await running.until_routable(*workers)
            if processes > 1:
                await running.until("/status", lambda body: serving(body, processes))

            async def statuses():
                responses = [
                    await running.client.post("/skyrl/v1/generate", json={"token_ids": [1]}),
                    await running.client.post("/init_broadcaster", json={"rank_offset": 1}),
                    await running.client.get("/liveness_of_engines"),
                ]
                return [response.status_code for response in responses], responses

            assert (await statuses())[0] == [404, 404, 404]
            put(file, without_routes + CONFIGURED_ROUTES)
            assert (await running.client.post("/reload")).status_code == 200
            codes, responses = await statuses()
            assert codes == [200, 200, 200], [response.text for response in responses]
            assert sum(counts_of("/skyrl/v1/generate")) == 1
            assert counts_of("/init_broadcaster") == counts_of("/liveness_of_engines") == [1, 1]
            assert [result["worker"] for result in responses[1].json()["results"]] == [
                worker.url for worker in workers
            ]
            rejected = await running.client.get("/skyrl/v1/generate")
            assert (rejected.status_code, rejected.headers["allow"]) == (405, "POST")
            assert (await running.client.get("/init_broadcaster")).status_code == 405
            for path in ("/skyrl/v1/generate/x", "/init_broadcaster/x", "/skyrl/v1"):
                assert (await running.client.post(path, json={})).status_code == 404
            put(file, without_routes)
            assert (await running.client.post("/reload")).status_code == 200
            assert (await statuses())[0] == [404, 404, 404]


async def test_a_file_that_redefines_a_built_in_route_is_rejected(tmp_path, soon):
    file = tmp_path / "proxy.toml"
    put(file, "[server]\nport = 0\n")
    async with program("--config", file) as running:
        put(file, '[server]\nport = 0\n[[routes]]\npath = "/workers"\n')
        await running.until_logged("routes\\[0\\].path.*built-in control route")
        assert (await running.get_json("/workers"))["workers"] == []


@pytest.mark.parametrize("text", ["token_ids", "extra.ids"])
async def test_the_text_of_a_configured_route_is_read_from_its_keys(text):
    config = f"[routing]\npolicy = 'cache_aware'\n[[routes]]\npath = '/own'\ntext = ['{text}']\n"
    async with (
        fake_workers(*[answering(counted(b"{}"))] * 3) as workers,
        run_dataplane(*workers, config=config) as opened,
        opened.client() as client,
    ):
        for family in (7, 8, 9):
            for last in range(4):
                ids = [family] * 60 + [last]
                body = {"token_ids": ids, "extra": {"ids": ids}, "unread": last}
                await client.send(post(json.dumps(body).encode(), path="/own"))
                assert (await client.answer()).status == 200
            prefix = str([family] * 60)[:-1].encode()
            holders = [w for w in workers if any(prefix in body for _, body in w.requests)]
            assert len(holders) == 1
        await until(lambda: opened.is_idle())


CONTROL_ROUTES = """
[[control_routes]]
path = "/hold_on"
kind = "pause"

[[control_routes]]
path = "/go_on"
kind = "continue"

[[control_routes]]
path = "/new_weights"
kind = "update"
"""


async def test_a_configured_control_route_behaves_by_its_kind(tmp_path, soon):
    async def script(call):
        failed = "/new_weights" in call.line and call.body == b'{"fail": true}'
        await call.send(counted(b"{}", status="500 Oops" if failed else "200 OK"))

    file = tmp_path / "proxy.toml"
    async with fake_workers(script, script) as workers:
        entries = "".join(f'[[workers]]\nurl = "{worker.url}"\n' for worker in workers)
        routing = "[routing]\nwhile_paused = 'hold'\n[weight_sync]\nverify = 'off'\n"
        put(file, f"[server]\nport = 0\n{PROBES}{routing}{CONTROL_ROUTES}{entries}")
        async with program("--config", file) as running:
            await running.until_routable(*workers)
            assert (await running.client.post("/hold_on", json={})).status_code == 200
            body = await running.get_json("/workers")
            assert [worker["routable"] for worker in body["workers"]] == [False, False]
            assert (await running.client.post("/go_on", json={})).status_code == 200
            await running.until_routable(*workers)
            assert (await running.client.post("/new_weights", json={})).status_code == 200
            assert (await running.get_json("/weights"))["history"][-1]["path"] == "/new_weights"
            failed = await running.client.post("/new_weights", content=b'{"fail": true}')
            assert failed.status_code == 502
            uncertain = (await running.get_json("/weights"))["uncertain"]
            assert set(uncertain) == {worker.url for worker in workers}
