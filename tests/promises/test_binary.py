import importlib.util
import os
import signal
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from tests.promises.fleet_program import PATIENCE_SECS, Program, chat, put, toml, workers
from tests.tree import ROOT, sources

BUILD_SECS = 400
EMPTY = {"HOME": "/nonexistent"}  # it needs nothing of its environment, not even a PATH


@pytest.fixture(scope="module")
def binary(request) -> Path:
    """Built once, and again when a source is newer."""
    if importlib.util.find_spec("PyInstaller") is None:
        pytest.skip("PyInstaller is not installed: pip install 'omni-proxy[dev]'")
    folder = request.config.cache.mkdir("binary")
    built = folder / "omni-proxy"
    made_of = [*sources(), ROOT / "tools/build-binary", ROOT / "pyproject.toml"]
    newest = max(path.stat().st_mtime for path in made_of)
    if not built.exists() or built.stat().st_mtime < newest:
        build = [ROOT / "tools/build-binary", folder]
        done = subprocess.run(
            build, capture_output=True, text=True, timeout=BUILD_SECS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return built


@asynccontextmanager
async def running(binary, *words):
    """The binary as a process; at the end nothing of it is left, however it was left."""
    command = [str(binary), *map(str, words)]
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(command, stderr=subprocess.PIPE, env=EMPTY)
        program = Program(process)
        nursery.start_soon(program.listen)
        try:
            await program.arrive()
            yield program
        finally:
            with trio.CancelScope(shield=True):
                await program.client.aclose()
                if process.returncode is None:
                    process.terminate()  # which the outer process hands on, unlike a SIGKILL
                    with trio.move_on_after(PATIENCE_SECS):
                        await process.wait()
            nursery.cancel_scope.cancel()


def inner(process) -> int:
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def unpacked(process_id) -> Path:
    environment = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    found = next(each for each in environment if each.startswith(b"_PYI_APPLICATION_HOME_DIR="))
    return Path(os.fsdecode(found.partition(b"=")[2]))


def alive(process_id) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_one_file_routes_a_stream_reloads_and_leaves(binary, tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as (worker,):
        file.write_text(toml([worker]))
        async with running(binary, "--config", file) as program:
            folder = unpacked(inner(program.process))
            await program.until_routable(worker)
            async with program.client.stream(
                "POST", "/v1/chat/completions", json=chat(stream=True)
            ) as answer:
                text = "".join([piece async for piece in answer.aiter_text()])
            assert text == "data: a\n\ndata: rest\n\ndata: [DONE]\n\n"
            page = await program.client.get("/dashboard")
            assert page.text.startswith("<!doctype html>")
            put(file, toml([worker], more='[routing]\npolicy = "random"'))
            program.process.send_signal(signal.SIGHUP)
            await program.until(
                "/config", lambda told: told["config"]["routing"]["policy"] == "random"
            )
            assert await program.leave() == 0, program.log
            assert "Traceback" not in program.log
            assert not folder.exists()


async def test_a_sigkill_of_one_file_leaves_nobody_and_nothing(binary):
    async with workers("a") as (worker,):
        words = ("--worker-urls", worker.url, "--port", "0")
        async with running(binary, *words) as program:
            child = inner(program.process)
            folder = unpacked(child)
            url = program.client.base_url
            program.process.kill()
            with trio.fail_after(PATIENCE_SECS):
                await program.process.wait()
                while alive(child) or folder.exists():
                    await trio.sleep(0.02)
            # Of a connection that was kept, the next request learns of the end as a broken read.
            async with httpx.AsyncClient(trust_env=False) as fresh:
                with pytest.raises(httpx.ConnectError):
                    await fresh.get(url.join("/live"))


def test_one_file_has_every_command(binary, tmp_path):
    def run(*words):
        return subprocess.run(
            [binary, *words], capture_output=True, text=True, timeout=60, check=False, env=EMPTY
        )

    for words in (["--version"], ["top", "--help"], ["replica", "--help"], ["completion", "bash"]):
        told = run(*words)
        assert (told.returncode, told.stderr) == (0, ""), words
        assert "omni-proxy" in told.stdout
    told = run("status", "--url", "http://127.0.0.1:1")
    assert told.returncode == 2
    assert "nobody listens" in told.stderr
    told = run("replica", "--model", "tiny")
    assert told.returncode == 1
    assert "pip install 'omni-proxy[replica]'" in told.stderr
