"""One replica as a process, started once for many tests: text by the tiny model, audio by stages
that the input controls (tests.replica.api.audio_stages), and a stage that always raises."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import trio

from tests.ports import free_port
from tests.program_forkserver import REPLICA, ForkedPopen, forkserver

PATIENCE_SECS = 90
PIPELINE = """
name = "all"
entry = "prepare"
entries = {{ tts = "speak", asr = "hear", embed = "prepare", completion = "prepare" }}
max_in_flight = {max_in_flight}

[[stages]]
name = "prepare"
factory = "omni_proxy.replica.stages.prepare:build"
params = {{ model = "tiny" }}
next = ["decode", "broken"]
route = "tests.promises.support.replica_program:after_prepare"

[[stages]]
name = "decode"
factory = "omni_proxy.replica.stages.text:build"
params = {{ model = "tiny", threads = 1 }}
terminal = true

[[stages]]
name = "broken"
factory = "tests.replica.pipeline.pipeline_stages:failing"
terminal = true

[[stages]]
name = "speak"
factory = "tests.replica.api.audio_stages:build_voice"
process = "sound"
terminal = true

[[stages]]
name = "hear"
factory = "tests.replica.api.audio_stages:build_ear"
terminal = true
"""


def after_prepare(payload) -> str:
    return "broken" if payload.request.metadata.get("model") == "broken" else "decode"


@dataclass(frozen=True)
class Program:
    process: ForkedPopen
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_SECS, verify=False)

    def children(self) -> set[int]:
        pids = set()
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{task}/children") as file:
                pids |= set(map(int, file.read().split()))
        return pids


@contextmanager
def program(folder, max_in_flight=0) -> Iterator[Program]:
    """Starts a replica; `healthy` waits until it is ready."""
    file = folder / "pipeline.toml"
    file.write_text(PIPELINE.format(max_in_flight=max_in_flight))
    with started("--pipeline", str(file)) as running:
        yield running


@contextmanager
def started(*words) -> Iterator[Program]:
    """Starts a replica with these arguments."""
    port = free_port()
    process = forkserver(*REPLICA).popen(
        "replica", "--port", str(port), *words, "--log-level", "error"
    )
    try:
        yield Program(process, port)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()


async def until(holds):
    """Polls another process until `holds()` is true; returns the result."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            try:
                if result := await holds():
                    return result
            except httpx.TransportError:
                pass  # the process does not listen yet
            await trio.sleep(0.01)


async def healthy(client) -> None:
    async def holds():
        return (await client.get("/health")).status_code == 200

    await until(holds)


async def gauges(client) -> dict[str, float]:
    """Returns the values of /metrics by name."""
    lines = (await client.get("/metrics")).text.splitlines()
    values = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in values}
