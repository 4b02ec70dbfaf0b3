"""`launch_router` in a trainer's process: how the proxy starts and ends there."""

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.promises.support.fleet_program import PATIENCE_SECS, workers
from tests.tree import ROOT

pytestmark = pytest.mark.usefixtures("soon")
CALL = "launch_router(RouterArgs(host='127.0.0.1', port={port}, **{fields}))"
IN_MAIN = "from sglang_router.launch_router import RouterArgs, launch_router\n" + CALL + "\n"
IN_THREAD = (
    "import threading\nfrom vllm_router.launch_router import RouterArgs, launch_router\n"
    "thread = threading.Thread(target=lambda: " + CALL + ")\nthread.start()\nthread.join()\n"
)


class Trainer:
    def __init__(self, process, port):
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"

    async def until_healthy(self):
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            while True:
                assert self.process.returncode is None, self.process.returncode
                try:
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await trio.sleep(0.05)

    async def until_closed(self):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", self.port)).aclose()
            except OSError:
                return
            await trio.sleep(0.05)

    def children(self):
        listed = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(listed) as file:
            return list(map(int, file.read().split()))

    async def ended(self):
        with trio.fail_after(PATIENCE_SECS):
            return await self.process.wait()


def read_proc(process, name):
    with open(f"/proc/{process}/{name}") as file:
        return file.read()


@asynccontextmanager
async def trainer(code, tmp_path, fields="{}", **options):
    """A process that runs `code`; it is killed at the end."""
    port = free_port()
    path = [ROOT, ROOT / "packages/sglang_router", ROOT / "packages/vllm_router"]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "XDG_STATE_HOME": str(tmp_path),
    }
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", code.format(port=port, fields=fields)],
        env=environ, stdin=subprocess.DEVNULL, **options,
    )  # fmt: skip
    try:
        yield Trainer(process, port)
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()


@pytest.mark.parametrize("code", [IN_MAIN, IN_THREAD])
async def test_the_proxy_ends_when_its_caller_is_killed(code, tmp_path):
    async with trainer(code, tmp_path) as running:
        await running.until_healthy()
        running.process.kill()
        await running.until_closed()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_requests_and_then_the_call_returns(number, tmp_path):
    async with workers("w") as (worker,):
        worker.gate = trio.Event()
        fields = repr({"worker_urls": [worker.url], "health_success_threshold": 1})
        async with (
            trainer(IN_MAIN, tmp_path, fields) as running,
            httpx.AsyncClient(verify=False) as client,
        ):
            await running.until_healthy()
            async with trio.open_nursery() as nursery:
                answers = []

                async def ask():
                    url = f"{running.url}/v1/chat/completions"
                    answers.append(await client.post(url, json={"messages": []}, timeout=60))

                nursery.start_soon(ask)
                await worker.halfway.wait()
                running.process.send_signal(number)
                await running.until_closed()
                worker.gate.set()
            assert [answer.status_code for answer in answers] == [200]
            assert await running.ended() == 0


async def test_command_lines_have_no_keys_and_the_process_has_the_routers_name(tmp_path):
    fields = repr({"api_key": "s3cret"})
    async with trainer(IN_MAIN, tmp_path, fields) as running:
        await running.until_healthy()
        (child,) = running.children()
        assert "s3cret" not in read_proc(child, "cmdline")
        assert read_proc(child, "comm") == "sglang::router\n"
        async with httpx.AsyncClient(verify=False) as client:
            answer = await client.post(f"{running.url}/generate", json={"text": "x"})
            assert answer.status_code == 401


async def test_a_port_in_use_raises_an_error_in_the_caller(tmp_path):
    async with workers("w") as (worker,):
        taken = int(worker.url.rpartition(":")[2])
        code = IN_MAIN.replace("{port}", str(taken)).replace("{fields}", "{{}}")
        async with trainer(code, tmp_path, stderr=subprocess.PIPE) as running:
            output = b"".join([piece async for piece in running.process.stderr]).decode()
            assert await running.ended() == 1
            assert (
                f'listen_failed address=127.0.0.1:{taken} error="Address already in use"' in output
            )
            assert "RouterEnded: omni-proxy ended with exit status 1" in output


async def test_unsupported_arguments_raise_an_error(tmp_path):
    fields = repr({"mini_lb": True})
    async with trainer(IN_MAIN, tmp_path, fields, stderr=subprocess.PIPE) as running:
        output = b"".join([piece async for piece in running.process.stderr]).decode()
        assert await running.ended() == 1
        assert "RouterArgsError: not served by omni-proxy:" in output
        assert "mini_lb: a policy picks" in output
