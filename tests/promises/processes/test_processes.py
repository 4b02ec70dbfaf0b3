"""Several data-plane processes act as one proxy while some of them start, drain or die."""

import os
import signal

import trio

from tests.processes import until_gone
from tests.promises.support.clients import STREAMED, client_of, post
from tests.promises.support.fleet_program import PATIENCE_SECS, program, put, toml, workers
from tests.promises.support.processes_fixture import (
    address,
    held_streams,
    in_flight,
    open_gates,
    read_whole_stream,
    run_processes,
    send_requests,
    serving,
    until_one_closed,
)


async def test_requests_reach_every_process_and_are_counted_once(tmp_path):
    async with run_processes(tmp_path, "a", "b") as running:
        for _ in range(40):
            async with client_of(address(running)) as client:
                await client.send(post())
                assert (await client.answer()).status == 200

        def all_reported(status: dict) -> bool:  # ended and accepted ones are reported separately
            rows = status["data_plane"]["processes"]
            completed = status["data_plane"]["ended"].get("completed", 0)
            return completed >= 40 and all(row["accepted"] for row in rows)

        body = await running.until("/status", all_reported)
        assert len({row["pid"] for row in body["data_plane"]["processes"]} | {body["pid"]}) == 3

        def all_routed(listed: dict) -> bool:
            return sum(worker["routed_requests"] for worker in listed["workers"]) == 40

        await running.until("/workers", all_routed)
        text = (await running.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if 'route="/v1/chat/completions"' in line]
        totals = [line for line in lines if line.startswith("omni_proxy_requests_total")]
        assert sum(float(line.rpartition(" ")[2]) for line in totals) == 40


async def test_clients_of_the_main_process_move_to_the_others_without_a_failed_request(tmp_path):
    async with (
        run_processes(tmp_path, "a", count=1) as running,
        client_of(address(running)) as idle,
        client_of(address(running)) as busy,
        client_of(address(running)) as streams,
    ):
        await idle.send(post())
        assert (await idle.answer()).one("connection") != "close"
        running.fleet[0].gate = trio.Event()
        await streams.send(post(STREAMED))
        await streams.until(b"\n\n")
        put(running.file, toml(running.fleet, more="processes = 2"))
        closing = False
        while not closing:  # sequential requests without a pause
            await busy.send(b"GET /live HTTP/1.1\r\nhost: proxy\r\n\r\n")
            response = await busy.answer("GET")
            assert response.status == 200
            closing = response.one("connection") == "close"
        assert await busy.until_closed() == b""
        open_gates(running)
        assert await read_whole_stream(streams)
        streams.rest = b""
        for client in (idle, streams):  # idle connections stay open until their next request
            await client.send(post())
            response = await client.answer()
            assert (response.status, response.one("connection")) == (200, "close")
            assert await client.until_closed() == b""
        await running.until("/status", serving)
        async with client_of(address(running)) as client:
            for _ in range(3):
                await client.send(post())
                assert (await client.answer()).one("connection") != "close"


async def test_a_killed_process_loses_only_its_own_connections_and_is_replaced(tmp_path):
    async with (
        run_processes(tmp_path, "a", "b") as running,
        held_streams(running, 10, everywhere=True) as streams,
    ):
        count = len(streams)
        assert sum(await in_flight(running)) == count
        victim = (await running.get_json("/status"))["data_plane"]["processes"][0]
        os.kill(victim["pid"], signal.SIGKILL)
        await until_one_closed(streams)  # until then, the kernel may give it new connections
        lost = victim["in_flight"]
        assert 0 < lost < count
        await running.until(
            "/workers", lambda t: sum(w["in_flight"] for w in t["workers"]) == count - lost
        )
        open_gates(running)
        completed = 0
        for stream in streams:
            completed += await read_whole_stream(stream)
        assert completed == count - lost
        body = await running.until("/status", serving)
        assert [row["restarts"] for row in body["data_plane"]["processes"]] == [1, 0]
        await running.until("/workers", lambda t: not any(w["in_flight"] for w in t["workers"]))
        assert (await running.get_json("/status"))["data_plane"]["inflight"] == 0
        await running.until_logged("was ended by SIGKILL")


async def test_a_reload_responds_after_every_process_has_applied_it(tmp_path):
    async with run_processes(tmp_path, "a", "b") as running:
        a, b = running.fleet
        put(running.file, toml([b], more="processes = 2\nmax_payload_size = 100"))
        response = await running.client.post("/reload")
        assert response.json()["outcome"] in ("applied", "unchanged")
        a.requests = 0
        for _ in range(20):
            async with client_of(address(running)) as client:
                await client.send(post(), post(b" " * 101))
                assert [(await client.answer()).status for _ in range(2)] == [200, 413]
        assert a.requests == 0


async def test_the_number_of_processes_may_change_under_load(tmp_path):
    async with run_processes(tmp_path, "a", count=1) as running, trio.open_nursery() as nursery:
        completed, stop = [0], trio.Event()
        for _ in range(4):
            nursery.start_soon(send_requests, running, completed, stop)
        for count in (3, 2, 1):
            put(running.file, toml(running.fleet, more=f"processes = {count}"))
            assert (await running.client.post("/reload")).status_code == 200
            expected = 0 if count == 1 else count
            await running.until(
                "/status",
                lambda t, expected=expected: len(t["data_plane"].get("processes", ())) == expected,
            )
            if expected:
                await running.until("/status", lambda t, expected=expected: serving(t, expected))
            before = completed[0]
            while completed[0] < before + 50:
                await trio.sleep(0.01)
        stop.set()


async def test_the_number_of_processes_may_change_again_during_a_drain(tmp_path):
    async with run_processes(tmp_path, "a", count=1) as running, trio.open_nursery() as nursery:
        completed, stop = [0], trio.Event()
        for _ in range(8):
            nursery.start_soon(send_requests, running, completed, stop)
        for count in (3, 1, 2):
            put(running.file, toml(running.fleet, more=f"processes = {count}"))
            assert (await running.client.post("/reload")).status_code == 200
            if count == 3:
                await running.until("/status", lambda body: serving(body, 3))
        body = await running.until("/status", serving)
        assert [row["process"] for row in body["data_plane"]["processes"]] == [4, 5]
        before = completed[0]
        while completed[0] < before + 100:
            await trio.sleep(0.01)
        stop.set()


async def test_a_drain_completes_the_requests_of_every_process(tmp_path):
    async with (
        run_processes(tmp_path, "a") as running,
        held_streams(running, 6, everywhere=True) as streams,
    ):
        running.process.send_signal(signal.SIGTERM)
        await running.until_logged("drain_started")
        await trio.sleep(0.1)
        open_gates(running)
        for stream in streams:
            assert await read_whole_stream(stream)
        with trio.fail_after(PATIENCE_SECS):
            assert await running.process.wait() == 0


async def test_the_processes_exit_with_the_main_process(tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as fleet:
        put(file, toml(fleet, more="processes = 2"))
        async with program("--config", file) as running:
            body = await running.until("/status", serving)
            pids = [row["pid"] for row in body["data_plane"]["processes"]]
            running.process.kill()
            await running.process.wait()
            await until_gone(*pids)
