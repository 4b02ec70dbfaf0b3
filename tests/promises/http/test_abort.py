"""An abort ends queued and running requests at once and affects nothing else."""

import json
from contextlib import asynccontextmanager

import pytest
import trio

from omni_proxy.admin_ops.abort_requests import as_vllm_writes
from tests.dataplane.loop_script import until
from tests.promises.support.abort_engines import VLLM, Engine
from tests.promises.support.clients import client_of, post
from tests.promises.support.fakes import PATIENCE_SECS
from tests.promises.support.fleet_program import program, put
from tests.promises.support.processes_fixture import serving
from tests.promises.support.tiny_fleet import known, replicas
from tests.promises.support.tiny_fleet import toml as toml_of

PROBES = "[health]\ninterval_secs = 0.2\nsuccess_threshold = 1\n"
MANY = 1000


@asynccontextmanager
async def fleet(tmp_path, *engines, server="", more="", processes=1):
    """The program with these engines as its workers."""
    file = tmp_path / "proxy.toml"
    async with trio.open_nursery() as nursery:
        for engine in engines:
            await nursery.start(engine.serve)
        entries = "".join(f'[[workers]]\nurl = "{engine.url}"\n' for engine in engines)
        server = f"port = 0\nprocesses = {processes}\n{server}"
        put(file, f"[server]\n{server}\n{PROBES}{more}\n{entries}")
        async with program("--config", file) as running:
            running.client.headers["connection"] = "close"
            await running.until_routable(*engines)
            if processes > 1:
                await running.until("/status", lambda body: serving(body, processes))
            yield running
        nursery.cancel_scope.cancel()


class Streams:
    """Streamed generations that clients have started through the proxy."""

    def __init__(self, running, nursery):
        self._running, self._nursery = running, nursery
        self.begun, self.ended = 0, []

    def begin(self, rid, path="/generate", **fields):
        body = {"text": "hi", "stream": True, "rid": rid, **fields}
        self._nursery.start_soon(self._run, path, json.dumps(body).encode())

    async def _run(self, path, body):
        async with client_of(self._running.client.base_url.netloc.decode()) as client:
            await client.send(post(body, path=path))
            await client.until(b"\r\n\r\n")
            self.begun += 1
            self.ended.append(await client.until(b"[DONE]"))

    async def until_ended(self, count):
        with trio.fail_after(PATIENCE_SECS):
            await until(lambda: len(self.ended) == count)


@asynccontextmanager
async def streams(running):
    async with trio.open_nursery() as nursery:
        yield Streams(running, nursery)
        nursery.cancel_scope.cancel()


def generating(*engines):
    return sum(len(engine.running) for engine in engines)


async def abort(running, path="/abort_request", **fields):
    answer = await running.client.post(path, json=fields)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("processes", [1, 2])
async def test_aborting_one_id_calls_only_the_worker_that_runs_it(tmp_path, soon, processes):
    engines = Engine(), Engine(), Engine()
    async with (
        fleet(tmp_path, *engines, processes=processes) as running,
        streams(running) as generations,
    ):
        for number in range(12):
            generations.begin(f"r{number}")
        await until(lambda: generating(*engines) == 12)
        (holder,) = [engine for engine in engines if "r7" in engine.running]
        status, body = await abort(running, rid="r7")
        assert status == 200
        assert [result["worker"] for result in body["results"]] == [holder.url]
        await generations.until_ended(1)
        assert b'"finish_reason": "abort"' in generations.ended[0]
        assert [engine.aborts for engine in engines] == [
            [{"rid": "r7"}] if engine is holder else [] for engine in engines
        ]
        assert generating(*engines) == 11


async def test_abort_all_ends_a_thousand_generations_and_changes_nothing_else(tmp_path, soon):
    engines = Engine(), Engine(), Engine()
    async with fleet(tmp_path, *engines) as running, streams(running) as generations:
        before = await running.get_json("/workers")
        for number in range(MANY):
            generations.begin(f"r{number}")
        await until(lambda: generating(*engines) == MANY)
        status, body = await abort(running, abort_all=True)
        assert (status, len(body["results"])) == (200, 3)
        await generations.until_ended(MANY)
        await until(lambda: not generating(*engines))
        assert all(engine.aborts == [{"abort_all": True}] for engine in engines)
        idle = await running.until(
            "/workers", lambda body: not any(row["in_flight"] for row in body["workers"])
        )
        same = ("url", "routable", "disabled", "weight_version", "status")
        for then, now in zip(before["workers"], idle["workers"], strict=True):
            assert {key: then[key] for key in same} == {key: now[key] for key in same}
        weights = await running.get_json("/weights")
        assert (weights["operation"], weights["history"], weights["uncertain"]) == (None, [], {})
        assert (await running.ask()).status_code == 200


async def test_an_unknown_id_is_aborted_at_all_live_workers(tmp_path, soon):
    engines = Engine(), Engine(), Engine()
    async with fleet(tmp_path, *engines) as running:
        answer = await running.client.put(f"/workers/{engines[0].url}", json={"disabled": True})
        assert answer.status_code in (200, 202)
        assert (await running.client.post("/pause_generation", json={})).status_code in (200, 502)
        status, body = await abort(running, rid="elsewhere")
        assert (status, len(body["results"])) == (200, 3)
        assert all(engine.aborts == [{"rid": "elsewhere"}] for engine in engines)


async def test_a_prefix_is_aborted_at_all_workers(tmp_path, soon):
    engines = Engine(), Engine()
    async with fleet(tmp_path, *engines) as running, streams(running) as generations:
        for rid in ("a::1", "a::2", "b::1", "b::2"):
            generations.begin(rid)
        await until(lambda: generating(*engines) == 4)
        status, body = await abort(running, rid="a::", prefix=True)
        assert (status, len(body["results"])) == (200, 2)
        await generations.until_ended(2)
        assert {rid for engine in engines for rid in engine.running} == {"b::1", "b::2"}


async def test_a_worker_that_cannot_be_reached_is_reported(tmp_path, soon):
    engines = Engine(), Engine()
    more = "failure_threshold = 1000"
    async with fleet(tmp_path, *engines, more=more) as running:
        unreachable = Engine()
        async with trio.open_nursery() as nursery:
            await nursery.start(unreachable.serve)
            answer = await running.client.post("/workers", json={"url": unreachable.url})
            assert answer.status_code in (200, 202)
            await running.until_routable(*engines, unreachable)
            nursery.cancel_scope.cancel()
        status, body = await abort(running, abort_all=True)
        assert status == 502
        results = {result["worker"]: result for result in body["results"]}
        assert "error" in results[unreachable.url]
        assert all(results[engine.url]["success"] for engine in engines)


async def test_an_abort_does_not_wait_for_a_running_operation(tmp_path, soon):
    engine = Engine()
    more = "[weight_sync]\nwhile_updating = 'pass'\nverify = 'off'"
    async with (
        fleet(tmp_path, engine, more=more) as running,
        streams(running) as generations,
        trio.open_nursery() as nursery,
    ):
        generations.begin("r1")
        await until(lambda: generating(engine) == 1)
        engine.gate = trio.Event()

        async def update():
            await running.client.post("/update_weights_from_disk", json={"model_path": "/w"})

        nursery.start_soon(update)
        await engine.updating.wait()
        assert (await abort(running, rid="r1"))[0] == 200
        await generations.until_ended(1)
        assert (await running.get_json("/weights"))["operation"] is not None
        engine.gate.set()


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_queued_request_ends_with_the_response_of_an_aborted_engine_request(
    tmp_path, soon, processes
):
    engine = Engine()
    server = "queue_size = 50\nqueue_timeout_secs = 600"
    async with fleet(tmp_path, engine, server=server, processes=processes) as running:
        url = f"/workers/{engine.url}"
        assert (await running.client.put(url, json={"disabled": True})).status_code < 300
        answers = {}

        async def ask(name, path, **fields):
            answer = await running.client.post(path, json=fields)
            answers[name] = answer

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: ask("one", "/generate", rid="w1", text="a"))
            nursery.start_soon(
                lambda: ask("streamed", "/generate", rid="w2", text="a", stream=True)
            )
            chat = {"messages": [], "request_id": "w3"}
            nursery.start_soon(lambda: ask("chat", "/v1/chat/completions", **chat))
            nursery.start_soon(lambda: ask("other", "/generate", rid="x", text="a"))
            await waiting(running, 4)
            for rid in ("w1", "w2", "w3"):
                status, body = await abort(running, rid=rid)
                assert (status, body["results"], body["ended_in_queue"]) == (200, [], 1)
            await until(lambda: len(answers) == 3)
            assert answers["one"].json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert answers["one"].json()["meta_info"]["id"] == "w1"
            *events, last = [line for line in answers["streamed"].text.split("\n\n") if line]
            assert last == "data: [DONE]"
            assert len(events) == 1
            assert answers["chat"].json()["choices"][0]["finish_reason"] == "abort"
            assert {line for line, _ in engine.requests} <= {
                "GET /model_info HTTP/1.1",
                "GET /server_info?config_format=json HTTP/1.1",
            }
            assert (await running.client.put(url, json={"disabled": False})).status_code < 300
        assert answers["other"].json() == {"id": "x"}  # no abort named it


async def waiting(running, count):
    await running.until("/status", lambda body: body["data_plane"]["waiting"] == count)


async def test_an_abort_is_translated_for_engines_of_the_other_dialect(tmp_path, soon):
    sglang, vllm = Engine(), Engine(VLLM)
    async with fleet(tmp_path, sglang, vllm) as running, streams(running) as generations:
        for number in range(6):
            generations.begin(f"r{number}")
        await until(lambda: generating(sglang, vllm) == 6)
        vllm_ids = list(vllm.running)
        status, body = await abort(running, rid=vllm_ids[0])
        assert (status, len(body["results"])) == (200, 1)
        assert vllm.aborts == [{"request_ids": list(as_vllm_writes(vllm_ids[0]))}]
        status, body = await abort(running, VLLM, request_ids=[next(iter(sglang.running))])
        assert (status, body["status"], body["aborted"]) == (200, "aborted", 1)
        status, body = await abort(running, VLLM)
        assert (status, len(body["results"])) == (200, 2)
        assert (vllm.aborts[-1], sglang.aborts[-1]) == ({}, {"abort_all": True})
        await generations.until_ended(6)


async def test_real_replicas_of_both_dialects_abort_requests_and_become_idle(tmp_path, soon):
    pytest.importorskip("torch")
    file = tmp_path / "proxy.toml"
    async with replicas(2) as both, replicas(1, "--dialect", "vllm") as vllm:
        engines = [*both, *vllm]
        put(file, toml_of(engines))
        async with program("--config", file) as running:
            await known(running, 3)
            finish_reasons = {}

            async def ask(rid):
                sampling = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
                body = {"token_ids": list(range(20, 40)), "request_id": rid}
                path = "/inference/v1/generate"
                answer = await running.client.post(path, json={**body, "sampling_params": sampling})
                finish_reasons[rid] = answer.json()["choices"][0]["finish_reason"]

            async def until_running(count):
                await running.until(
                    "/workers",
                    lambda body: sum(row["in_flight"] for row in body["workers"]) == count,
                )

            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(ask, f"r{number}")
                await until_running(12)
                for number in range(4):  # enough that each kind of replica runs one of them
                    status, body = await abort(running, rid=f"r{number}")
                    assert (status, len(body["results"])) == (200, 1), body
                await until(lambda: len(finish_reasons) == 4)
                await until_running(8)
                status, body = await abort(running, VLLM, request_ids=["r4", "r5"])
                assert status == 200
                assert body["aborted"] == sum(
                    result["body"]["aborted"] for result in body["results"]
                )
                await until_running(6)
                status, body = await abort(running, abort_all=True)
                assert (status, len(body["results"])) == (200, 3)
            assert finish_reasons == {f"r{number}": "abort" for number in range(12)}
            await until_running(0)
