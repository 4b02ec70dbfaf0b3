import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from omni_proxy.shared.watchdog import STALL_EVENT
from tests.example_counts import thorough
from tests.processes import alive
from tests.promises.support.fleet_program import PATIENCE_SECS, Program, chat, put, toml, workers
from tests.tree import ROOT, sources
from tools.archive import pack

BUILD_SECS = 400
# By compression level: as released (9), and fast (1), which builds faster. The limits
# are slightly above the present sizes: one more library exceeds them.
MAX_BYTES = {"9": 15_300_000, "1": 16_630_000}
UNKNOWN_NAME = """
[[discover]]
name = "d"
kind = "dns"
dns_name = "workers.invalid"
port = 1
"""
EMPTY = {"HOME": "/nonexistent"}  # the binary needs no variable, not even PATH


def compression() -> str:
    return "9" if thorough() else "1"


def folder_name(level: str) -> str:
    return f"binary-{level}"


@pytest.fixture(scope="module")
def binary(request) -> Path:
    """Built once, and rebuilt when a source file is newer."""
    if importlib.util.find_spec("PyInstaller") is None:
        pytest.skip("PyInstaller is not installed: pip install 'omni-proxy[dev]'")
    folder = request.config.cache.mkdir(folder_name(compression()))
    built = folder / "omni-proxy"
    build_files = (
        "tools/build-binary",
        "tools/docless.py",
        "tools/import_scan.py",
        "pyproject.toml",
    )
    inputs = [*sources(), *(ROOT / name for name in build_files)]
    newest = max(path.stat().st_mtime for path in inputs)
    if not built.exists() or built.stat().st_mtime < newest:
        build = [ROOT / "tools/build-binary", folder]
        env = {**os.environ, "PYINSTALLER_ZLIB_COMPRESSION_LEVEL": compression()}
        done = subprocess.run(
            build, capture_output=True, text=True, timeout=BUILD_SECS, check=False, env=env
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return built


@asynccontextmanager
async def running(binary, *words, env=EMPTY, cwd=None):
    """Run the binary as a process; all its processes have ended when the context exits."""
    command = [str(binary), *map(str, words)]
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(
            command, stderr=subprocess.PIPE, env=env, cwd=cwd
        )
        program = Program(process, process.stderr)
        nursery.start_soon(program.listen)
        try:
            await program.arrive()
            yield program
        finally:
            with trio.CancelScope(shield=True):
                await program.client.aclose()
                if process.returncode is None:
                    process.terminate()  # unlike SIGKILL, it is forwarded to the inner process
                    with trio.move_on_after(PATIENCE_SECS):
                        await process.wait()
            nursery.cancel_scope.cancel()


def children(process_id) -> list[int]:
    """The children of all threads of a process."""
    per_thread = [file.read_text() for file in Path(f"/proc/{process_id}/task").glob("*/children")]
    return [int(child) for ids in per_thread for child in ids.split()]


def inner(process) -> int:
    (child,) = children(process.pid)
    return child


def command_line(process_id) -> list[str]:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text().split("\0")
    except OSError:  # it has just ended
        return []


def dataplane_processes(process_id) -> dict[int, list[str]]:
    """The command line of each data-plane process of a program, by process id."""
    lines = {child: command_line(child) for child in children(process_id)}
    return {child: line for child, line in lines.items() if "data-plane-process" in line}


async def until_serving(program, count, without=()):
    """Wait for `count` serving data-plane processes, none of `without`; return their ids."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            ids = await serving(program)
            if len(ids) == count and not set(ids) & set(without):
                return ids
            await trio.sleep(0.02)


async def serving(program):
    """Uses a new connection: a kept one may have ended with its process."""
    async with httpx.AsyncClient(
        base_url=program.client.base_url, trust_env=False, verify=False
    ) as fresh:
        try:
            body = (await fresh.get("/status")).json()
        except httpx.TransportError:
            return []
    return [
        row["pid"] for row in body["data_plane"].get("processes", ()) if row["state"] == "serving"
    ]


def unpacked(process_id) -> Path:
    environment = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    name = b"_PYI_APPLICATION_HOME_DIR="
    variable = next(variable for variable in environment if variable.startswith(name))
    return Path(os.fsdecode(variable.removeprefix(name)))


def test_the_gate_builds_the_binary_in_the_folder_of_this_test():
    """Otherwise this test builds another one, while the other tests run."""
    gate = (ROOT / ".ci/run").read_text()
    command = re.search(r"COMPRESSION_LEVEL=(\d) tools/build-binary \.pytest_cache/d/(\S+)", gate)
    assert (command[1], command[2]) == ("1", folder_name("1"))


async def test_the_binary_serves_a_stream_reloads_and_exits(binary, tmp_path):
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
            put(file, toml([worker], more='[routing]\npolicy = "random"') + UNKNOWN_NAME)
            program.process.send_signal(signal.SIGHUP)
            await program.until(
                "/config", lambda body: body["config"]["routing"]["policy"] == "random"
            )
            await program.until("/status", lambda body: body["discovery"])
            assert await program.leave() == 0, program.log
            assert "Traceback" not in program.log
            assert STALL_EVENT not in program.log
            assert not folder.exists()


TWO_PROCESSES = "processes = 2"


async def test_the_binary_starts_its_own_data_plane_processes(binary, tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as (worker,):
        file.write_text(toml([worker], more=TWO_PROCESSES))
        async with running(binary, "--config", file) as program:
            first, second = await until_serving(program, 2)
            control = inner(program.process)
            assert all(line[0] == str(binary) for line in dataplane_processes(control).values())
            os.kill(first, signal.SIGKILL)
            ids = await until_serving(program, 2, without=[first])
            assert second in ids
            assert dataplane_processes(control).keys() == set(ids)
            await serves_requests(program, worker)
            assert await program.leave() == 0, program.log
            assert not any(map(alive, ids))
            assert "Traceback" not in program.log


async def test_a_sigkill_of_the_binary_leaves_no_process_and_no_file(binary, tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as (worker,):
        file.write_text(toml([worker], more=TWO_PROCESSES))
        async with running(binary, "--config", file) as program:
            ids = await until_serving(program, 2)
            control = inner(program.process)
            folder = unpacked(control)
            url = program.client.base_url
            program.process.kill()
            await until_ended(program, [control, *ids])
            with trio.fail_after(PATIENCE_SECS):
                while folder.exists():
                    await trio.sleep(0.02)
            # A new connection: on a kept one, the request would fail with a read error instead.
            async with httpx.AsyncClient(trust_env=False, verify=False) as fresh:
                with pytest.raises(httpx.ConnectError):
                    await fresh.get(url.join("/live"))


async def serves_requests(program, worker):
    async with httpx.AsyncClient(
        base_url=program.client.base_url, trust_env=False, verify=False
    ) as fresh:
        program.client, kept = fresh, program.client
        await kept.aclose()
        await program.until_routable(worker)
        assert (await program.ask()).status_code == 200


async def until_ended(program, ids):
    with trio.fail_after(PATIENCE_SECS):
        await program.process.wait()
        while any(map(alive, ids)):
            await trio.sleep(0.02)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Has only the modules of omni_proxy; their dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("archive")
    installed, packed = folder / "installed", folder / "omni-proxy.pyz"
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "omni_proxy", installed / "omni_proxy", ignore=unwanted)
    pack(installed, packed)
    shutil.rmtree(installed)
    return packed


@pytest.mark.parametrize("home", ["a home", "no home"])
async def test_an_archive_starts_its_own_data_plane_processes(archive, tmp_path, home):
    file, cache, temporary = tmp_path / "proxy.toml", tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    if home == "no home":
        cache.touch()  # a file, so no folder can be created in it
    env = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    async with workers("a") as (worker,):
        file.write_text(toml([worker], more=TWO_PROCESSES))
        words = ("-P", archive, "--config", file)
        async with running(sys.executable, *words, env=env, cwd="/") as program:
            ids = await until_serving(program, 2)
            assert all(
                str(archive) in dataplane_processes(program.process.pid)[child] for child in ids
            )
            os.kill(ids[0], signal.SIGKILL)
            ids = await until_serving(program, 2, without=ids[:1])
            unpacked_here = list(temporary.glob("*/omni_proxy"))
            assert len(unpacked_here) == (home == "no home")  # one folder for all processes
            await serves_requests(program, worker)
            program.process.kill()
            await until_ended(program, ids)


def test_the_binary_starts_in_locales_with_other_charsets(binary, tmp_path):
    if shutil.which("localedef") is None:
        pytest.skip("localedef is not installed")
    for language, charset in (("ja_JP", "EUC-JP"), ("zh_CN", "GBK"), ("ru_RU", "KOI8-R")):
        words = ["localedef", "-i", language, "-f", charset, tmp_path / f"{language}.{charset}"]
        compiled = subprocess.run(words, capture_output=True, text=True, check=False)
        if compiled.returncode > 1:  # 1: with warnings
            pytest.skip(compiled.stderr)
        env = EMPTY | {"LOCPATH": str(tmp_path), "LC_ALL": f"{language}.{charset}"}
        result = subprocess.run(
            [binary, "--version"], capture_output=True, timeout=60, check=False, env=env
        )
        assert (result.returncode, result.stderr) == (0, b""), charset


def test_the_size_of_the_binary_is_limited(binary):
    assert binary.stat().st_size < MAX_BYTES[compression()]


def test_the_binary_simulates_and_plots(binary, tmp_path):
    """The binary must include modules that a command imports only when it runs."""
    picture = tmp_path / "policies.svg"
    words = ["--workload", "uniform", "--requests", "20", "--policies", "random", "--plot", picture]
    done = subprocess.run(
        [binary, "simulate", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "random" in picture.read_text()


def test_the_binary_has_every_command(binary, tmp_path):
    def run(*words):
        return subprocess.run(
            [binary, *words], capture_output=True, text=True, timeout=60, check=False, env=EMPTY
        )

    for words in (["--version"], ["top", "--help"], ["replica", "--help"], ["completion", "bash"]):
        result = run(*words)
        assert (result.returncode, result.stderr) == (0, ""), words
        assert "omni-proxy" in result.stdout
    result = run("status", "--url", "http://127.0.0.1:1")
    assert result.returncode == 2
    assert "cannot connect to" in result.stderr
    result = run("replica", "--model", "tiny")
    assert result.returncode == 1
    assert "pip install 'omni-proxy[replica]'" in result.stderr
