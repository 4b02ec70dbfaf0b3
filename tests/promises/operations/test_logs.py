import fcntl
import json
import os
import shutil
from contextlib import suppress

import pytest
import trio

from tests.promises.support.clients import STREAMED, Truncated, post
from tests.promises.support.dataplane_fixture import Lines, dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    LAST_CHUNK,
    PATIENCE_SECS,
    SSE_HEAD,
    answering,
    chunk,
    counted,
    fake_workers,
    hanging_up_after,
    resetting,
)
from tests.promises.support.fleet_program import PROXY, Program, forkserver, program, put, toml

ROUTE_KEYS = {
    "timestamp", "event", "request_id", "method", "path", "model", "stream",
    "required_capabilities", "worker_id", "worker_url", "policy", "worker_state",
    "worker_health_state", "worker_disabled", "worker_routable", "attempt", "status_code",
    "duration_s", "ttfb_s", "request_bytes", "response_bytes", "completed", "client_disconnected",
    "error_type", "idempotency_key_present",
}  # fmt: skip
GOOD_STREAM = answering(SSE_HEAD, chunk(b"data: one\n\n"), LAST_CHUNK)


async def route_record(script, request):
    """The line of this request in the route log."""
    async with fake_workers(script) as fakes, run_dataplane(*fakes) as opened:
        opened.dataplane.recorders.route_log = lines = Lines()
        async with opened.client() as client:
            await client.send(request)
            with suppress(Truncated):
                await client.answer()
        (record,) = lines.records
        worker = opened.fleet.workers[0]
        assert (record["worker_id"], record["worker_url"]) == (worker.id, worker.url)
        return record


async def test_a_routed_request_writes_one_line_with_every_key():
    body = b'{"model": "m", "messages": []}'
    request = post(body, "x-request-id: r-1", "idempotency-key: k", path="/v1/chat/completions?q=1")
    record = await route_record(answering(counted(b"{}")), request)
    assert set(record) >= ROUTE_KEYS
    assert list(record) == sorted(record)
    fields = {key: record[key] for key in ROUTE_KEYS if not key.startswith("worker_")}
    assert fields.pop("duration_s") >= fields.pop("ttfb_s") >= 0
    assert fields.pop("timestamp").endswith("+00:00")
    assert fields == {
        "event": "request_complete", "request_id": "r-1", "method": "POST",
        "path": "/v1/chat/completions", "model": "m", "stream": False,
        "required_capabilities": ["chat"], "policy": "round_robin", "attempt": 1,
        "status_code": 200, "request_bytes": len(body), "response_bytes": 2, "completed": True,
        "client_disconnected": False, "error_type": None, "idempotency_key_present": True,
    }  # fmt: skip
    assert (record["worker_state"], record["worker_routable"]) == ("healthy", True)


async def test_a_stream_writes_its_line_at_its_end():
    record = await route_record(GOOD_STREAM, post(STREAMED))
    assert (record["event"], record["completed"]) == ("stream_complete", True)
    assert record["required_capabilities"] == ["chat", "streaming"]


async def test_a_broken_stream_is_logged():
    record = await route_record(hanging_up_after(SSE_HEAD, chunk(b"data: one\n\n")), post(STREAMED))
    assert (record["event"], record["completed"]) == ("stream_error", False)
    assert record["error_type"]
    assert record["status_code"] == 200


async def test_a_request_that_no_worker_answered_is_in_the_route_log_too():
    record = await route_record(resetting, post())
    # After the third failure the worker is out of rotation.
    assert (record["completed"], record["status_code"], record["attempt"]) == (False, 502, 3)


async def test_a_refusal_before_any_worker_is_in_the_access_log_only():
    async with fake_workers(GOOD_STREAM) as fakes, run_dataplane(*fakes) as opened:
        opened.dataplane.recorders.route_log = lines = Lines()
        async with opened.client() as client:
            await client.send(post(b"no json"))
            assert (await client.answer()).status == 400
        assert lines.records == []
        assert (opened.last["status"], opened.last["outcome"]) == (400, "refused")
        assert opened.last["ended_by"] == "proxy"


async def test_a_line_of_the_access_log_has_the_time_of_each_phase():
    async with fake_workers(GOOD_STREAM) as fakes, run_dataplane(*fakes) as opened:
        async with opened.client() as client:
            await client.send(post(STREAMED, "x-request-id: r-2"))
            await client.answer()
        line = opened.last
    times = [line[f"{phase}_ms"] for phase in ("head", "body", "connect", "answer", "total")]
    assert times == sorted(times)
    assert line["first_byte_ms"] >= line["response_head_ms"]
    assert (line["outcome"], line["status"], line["stream"]) == ("completed", 200, True)
    assert (line["request_id"], line["bytes_in"]) == ("r-2", len(STREAMED))


async def until_line(file, about=""):
    """The first complete line of the file that contains `about`."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            text = file.read_text() if file.exists() else ""
            for line in text.splitlines(keepends=True):
                if about in line and line.endswith("\n"):
                    return line
            await trio.sleep(0.02)


@pytest.mark.parametrize("form", ["text", "json"])
async def test_after_the_log_folder_is_deleted_requests_are_served_and_logged(tmp_path, form):
    logs = tmp_path / "logs"
    access, route = logs / "access.log", logs / "route.jsonl"
    more = f'access_log = "{access}"\nroute_log = "{route}"\nlog_format = "{form}"'
    file = tmp_path / "proxy.toml"
    async with fake_workers(answering(counted(b"{}"))) as fakes:
        put(file, toml(fakes, more=more))
        async with program("--config", file) as running:
            await running.until_routable(*fakes)
            assert (await running.ask()).status_code == 200
            assert set(json.loads(await until_line(route))) >= ROUTE_KEYS
            line = await until_line(access, "/v1/chat")
            if form == "json":
                assert json.loads(line)["status"] == 200
            else:
                assert " POST /v1/chat/completions 200 completed " in line
            shutil.rmtree(logs)
            for _ in range(3):
                assert (await running.ask()).status_code == 200
            await until_line(route)
            await until_line(access, "/v1/chat")


class Written(list):
    def write(self, record):
        self.append(record)


async def test_a_client_cannot_inject_log_lines():
    model, written = "m\n127.0.0.1 GET /fake 200\x1b[2J\u2028", Written()
    async with dataplane_and_client(GOOD_STREAM) as (opened, client):
        opened.dataplane.recorders.access_log, opened.dataplane.settings.access_log_is_json = (
            written,
            False,
        )
        await client.send(post(json.dumps({"model": model, "messages": []}).encode()))
        await client.answer()
    (line,) = written
    assert line.decode().isprintable()
    assert rb"model=m\n127.0.0.1\x20GET\x20/fake\x20200\x1b[2J\u2028 " in line


async def test_requests_are_served_although_stderr_is_not_read(tmp_path):
    """As on a terminal after Ctrl-S, or with a log collector that hangs."""
    file = tmp_path / "proxy.toml"
    output, stderr = os.pipe()
    fcntl.fcntl(stderr, fcntl.F_SETPIPE_SZ, 4096)
    async with (
        fake_workers(answering(counted(b"{}"))) as fakes,
        trio.lowlevel.FdStream(output) as out,
    ):
        put(file, toml(fakes))
        process = await forkserver(*PROXY).start("--config", str(file), stderr=stderr)
        os.close(stderr)
        running = Program(process, out)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(running.listen)
                await running.arrive()
                await running.until_routable(*fakes)
                nursery.cancel_scope.cancel()
            worker = (await running.get_json("/workers"))["workers"][0]["id"]
            with trio.fail_after(PATIENCE_SECS):
                for number in range(100):  # a line of more than 40 bytes for each
                    body = {"disabled": not number % 2}
                    answer = await running.client.put(f"/workers/{worker}", json=body)
                    assert answer.status_code == 200
                assert (await running.ask()).status_code == 200
            assert await running.leave() == 0
        finally:
            await running.end()
