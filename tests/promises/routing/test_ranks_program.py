"""Data-parallel ranks in the whole program: discovery, listing, and limits over processes."""

import json
import os
import signal
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from tests.promises.support.clients import client_of, post
from tests.promises.support.fakes import FakeWorker, counted
from tests.promises.support.fleet_program import chat, program, put
from tests.promises.support.processes_fixture import serving

HEADER = "x-data-parallel-rank"


class Engine(FakeWorker):
    """Imitates SGLang with four ranks; `posts` has the path and rank of each POST."""

    def __init__(self):
        super().__init__(self._answer)
        self.dp_size = 4
        self.posts = []
        self.gate = trio.Event()
        self.gate.set()

    async def _answer(self, call):
        method, path, _ = call.line.split()
        path = path.partition("?")[0]
        if path == "/server_info":
            await call.send(counted(json.dumps({"tp_size": 1, "dp_size": self.dp_size}).encode()))
            return
        if method == "POST":
            self.posts.append((path, dict(call.fields).get(HEADER)))
        if path.startswith("/v1/chat") or path == "/generate":
            await self.gate.wait()
        await call.send(counted(b'{"success": true}', "content-type: application/json"))

    def ranks(self, path):
        return Counter(rank for posted, rank in self.posts if posted == path)


@asynccontextmanager
async def started(tmp_path, *, processes=1, worker="", server=""):
    engine, file = Engine(), tmp_path / "proxy.toml"
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.serve)
        put(file, (
            f"[server]\nport = 0\nprocesses = {processes}\n{server}\n"
            "[health]\ninterval_secs = 0.2\nsuccess_threshold = 1\n"
            '[routing]\npolicy = "least_request"\n'
            f'[[workers]]\nurl = "{engine.url}"\nranks = "auto"\n{worker}\n'
        ))  # fmt: skip
        async with program("--config", file) as running:
            running.client.headers["connection"] = "close"
            await running.until("/workers", lambda body: ranks_of(body) == 4)
            if processes > 1:
                await running.until("/status", lambda body: serving(body, processes))
            yield running, engine
        nursery.cancel_scope.cancel()


def ranks_of(listed):
    return len(listed["workers"][0]["ranks"])


async def test_requests_are_spread_over_ranks_and_admin_calls_are_sent_once(tmp_path):
    async with started(tmp_path) as (running, engine):
        for _ in range(8):
            assert (await running.client.post("/v1/chat/completions", json=chat())).is_success
        assert engine.ranks("/v1/chat/completions") == {str(rank): 2 for rank in range(4)}
        for path, body in (
            ("/pause_generation", {"mode": "abort"}), ("/continue_generation", {}),
            ("/flush_cache", {}), ("/update_weights_from_disk", {"model_path": "m"}),
        ):  # fmt: skip
            assert (await running.client.post(path, json=body)).is_success, path
            assert engine.ranks(path) == {None: 1}
        (record,) = (await running.get_json("/workers"))["workers"]
        assert record["configured_ranks"] == "auto"
        assert [(r["rank"], r["successful_requests"], r["in_flight"]) for r in record["ranks"]] == [
            (rank, 2, 0) for rank in range(4)
        ]
        metrics = (await running.client.get("/metrics")).text
        for rank in range(4):
            labels = f'{{rank="{rank}",result="succeeded",worker="{engine.url}"}}'
            assert f"omni_proxy_worker_rank_attempts_total{labels} 2.0" in metrics


@pytest.mark.parametrize("processes", [1, 3])
async def test_no_rank_and_no_worker_exceeds_its_limit(tmp_path, processes):
    limit = "max_inflight = 6"  # 2 for each rank
    server = "queue_size = 100"
    async with started(tmp_path, processes=processes, worker=limit, server=server) as (
        running,
        engine,
    ):
        engine.gate = trio.Event()
        address = running.client.base_url.netloc.decode()
        async with trio.open_nursery() as nursery:
            statuses = []

            async def send_one(number):
                async with client_of(address) as client:
                    fields = [f"{HEADER}: 3"] if number < 2 else []
                    await client.send(post(json.dumps(chat()).encode(), *fields))
                    statuses.append((await client.answer()).status)

            for number in range(2):
                nursery.start_soon(send_one, number)
            while len(engine.posts) < 2:
                await trio.sleep(0.01)
            assert engine.ranks("/v1/chat/completions") == {"3": 2}
            for number in range(2, 20):
                nursery.start_soon(send_one, number)
            await running.until("/status", lambda body: body["data_plane"]["waiting"] == 14)
            body = await running.until("/workers", lambda body: body["workers"][0]["load"] == 6)
            while len(engine.posts) < 6:  # counted as sent, but not yet received
                await trio.sleep(0.01)
            assert sum(engine.ranks("/v1/chat/completions").values()) == 6
            (record,) = body["workers"]
            assert [rank["in_flight"] for rank in record["ranks"]].count(0) <= 1
            assert record["ranks"][3]["in_flight"] == 2
            assert max(rank["in_flight"] for rank in record["ranks"]) == 2
            assert sum(rank["in_flight"] for rank in record["ranks"]) == 6
            engine.gate.set()
        assert statuses == [200] * 20
        await running.until("/workers", lambda body: in_flight_at_ranks(body) == 0)
        await running.until("/workers", lambda body: succeeded_at_ranks(body) == 20)


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_reload_ends_no_request_in_flight_at_a_rank(tmp_path, processes):
    async with started(tmp_path, processes=processes) as (running, engine):
        engine.gate = trio.Event()
        file = tmp_path / "proxy.toml"
        text = file.read_text()
        async with client_of(running.client.base_url.netloc.decode()) as client:
            await client.send(post(json.dumps(chat()).encode(), f"{HEADER}: 3"))
            await running.until("/workers", lambda body: in_flight_at_ranks(body) == 1)
            for ranks, count in (("2", 2), ("1", 0), ('"auto"', 4)):
                put(file, text.replace('ranks = "auto"', f"ranks = {ranks}"))
                body = await running.until("/workers", lambda body, n=count: ranks_of(body) == n)
                assert body["workers"][0]["in_flight"] == 1
            assert body["workers"][0]["ranks"][3]["in_flight"] == 1
            engine.gate.set()
            assert (await client.answer()).status == 200
        await running.until("/workers", lambda body: body["workers"][0]["in_flight"] == 0)
        body = await running.get_json("/workers")
        assert in_flight_at_ranks(body) == 0
        assert engine.ranks("/v1/chat/completions") == {"3": 1}


async def test_requests_of_a_killed_process_do_not_stay_counted_at_ranks(tmp_path):
    async with started(tmp_path, processes=2) as (running, engine):
        engine.gate = trio.Event()
        address = running.client.base_url.netloc.decode()
        closed = trio.Event()
        async with trio.open_nursery() as nursery:

            async def send_one():
                async with client_of(address) as client:
                    await client.send(post(json.dumps(chat()).encode()))
                    assert await client.until_closed() == b""
                    closed.set()
                    await trio.sleep_forever()

            busy = []
            while len(busy) < 2:  # the kernel chooses the process of a connection
                nursery.start_soon(send_one)
                body = await running.get_json("/status")
                busy = [row for row in body["data_plane"]["processes"] if row["in_flight"]]
            os.kill(busy[0]["pid"], signal.SIGKILL)
            # This id may belong to a stand-in process, which ends before the one that serves.
            await closed.wait()
            await running.until("/status", lambda body: serving(body, 2))
            await running.until(
                "/workers", lambda body: only_survivors_in_flight(body, before=len(engine.posts))
            )
            nursery.cancel_scope.cancel()
        await running.until("/workers", lambda body: in_flight_at_ranks(body) == 0)
        engine.gate.set()


def in_flight_at_ranks(listed):
    return sum(rank["in_flight"] for rank in listed["workers"][0]["ranks"])


def only_survivors_in_flight(listed, before):
    return 0 < listed["workers"][0]["in_flight"] == in_flight_at_ranks(listed) < before


def succeeded_at_ranks(listed):
    return sum(rank["successful_requests"] for rank in listed["workers"][0]["ranks"])
