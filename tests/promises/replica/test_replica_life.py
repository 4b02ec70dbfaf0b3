"""The replica as a program: quick start, graceful shutdown, and clear errors if it cannot start."""

import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.program_forkserver import forking_interpreter

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytestmark = pytest.mark.usefixtures("soon")


@asynccontextmanager
async def replica(*arguments, python=sys.executable):
    port = free_port()
    argv = [python, "-m", "omni_proxy", "replica", "--port", str(port), *arguments]
    process = await trio.lowlevel.open_process(argv, stderr=subprocess.PIPE)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False
        ) as client:
            yield process, client
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stderr.aclose()


async def health_until(client, target):
    """Returns the states until `target`, without repeats; "refused" before it listens."""
    states = []
    while not states or states[-1] != target:
        try:
            state = (await client.get("/health")).json()["status"]
        except httpx.TransportError:
            state = "refused"
        if state not in states:
            states.append(state)
        await trio.sleep(0.01)
    return states


CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


async def test_a_replica_listens_while_it_loads_and_finishes_requests_at_shutdown():
    async with replica("--model", "tiny", "--max-in-flight", "1") as (process, client):
        assert await health_until(client, "healthy") == ["refused", "starting", "healthy"]
        response = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 8})
        assert response.json()["usage"]["completion_tokens"] == 8
        long = CHAT | {"max_tokens": 300, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=long) as streamed:
            lines = streamed.aiter_lines()
            await anext(lines)
            full = await client.post("/v1/chat/completions", json=CHAT)
            assert full.status_code == 503
            assert "The request queue is full." in full.text
            process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(rest).replace(": ", ":")
        assert await process.wait() == 0


@asynccontextmanager
async def streaming(client):
    """Opens an endless chat and reads its head and first event."""
    body = json.dumps(CHAT | {"max_tokens": 8000, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", client.base_url.port) as stream:
        await stream.send_all(head.encode() + body)
        received = b""
        while b"data: " not in received:
            received += await stream.receive_some()
        yield stream


async def until_refused(port):
    while True:
        try:
            await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
        except OSError:
            return


async def test_a_second_signal_ends_the_drain():
    arguments = ("--model", "tiny", "--drain-secs", "3600")
    async with replica(*arguments, python=forking_interpreter()) as (process, client):
        await health_until(client, "healthy")
        async with streaming(client) as stream:
            process.send_signal(signal.SIGTERM)
            await until_refused(client.base_url.port)
            assert await stream.receive_some()
            assert process.returncode is None
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


ENDLESS = """
name = "endless"
[[stages]]
name = "a"
factory = "tests.replica.pipeline.pipeline_stages:until_aborted"
process = "p"
terminal = true
"""


async def test_a_killed_stage_process_fails_its_stream_and_is_restarted(tmp_path):
    (tmp_path / "p.toml").write_text(ENDLESS)
    async with replica("--pipeline", str(tmp_path / "p.toml")) as (process, client):
        await health_until(client, "healthy")
        async with streaming(client) as stream:
            (child,) = children_of(process.pid)
            os.kill(child, signal.SIGKILL)
            received = b""
            while b"SIGKILL" not in received:
                received += await stream.receive_some()
            assert (await client.get("/health")).status_code == 503
        await health_until(client, "healthy")
        async with streaming(client):
            assert children_of(process.pid) != {child}


def children_of(pid):
    children = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            children |= set(map(int, file.read().split()))
    return children


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ('name = "x"\n[[stages]]\nname = "a"\nfactroy = "a.b:c"\n', "unknown key; did you mean"),
        (
            'name = "x"\n[[stages]]\nname = "a"\nfactory = "no.such:thing"\nterminal = true\n',
            "stage a: the package no is not installed",
        ),
    ],
)
async def test_an_error_in_the_pipeline_file_is_reported(tmp_path, pipeline, message):
    (tmp_path / "p.toml").write_text(pipeline)
    arguments = ("--pipeline", str(tmp_path / "p.toml"))
    async with replica(*arguments, python=forking_interpreter()) as (process, _):
        stderr = b""
        async for data in process.stderr:
            stderr += data
        assert message in stderr.decode()
        assert "Traceback" not in stderr.decode()
        assert await process.wait() in (1, 2)
