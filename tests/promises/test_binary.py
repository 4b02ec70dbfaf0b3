import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from omni_proxy.watchdog import STALL_EVENT
from tests.example_counts import thorough
from tests.processes import alive
from tests.promises.fleet_program import PATIENCE_SECS, Program, chat, put, toml, workers
from tests.tree import ROOT, sources
from tools.archive import pack

BUILD_SECS = 400
# Compressed as released, and quickly: to compress it takes a fifth of the time. It has 15.06 and
# 16.39 MB where this was written; a library more would be seen.
MOST_BYTES = {"9": 15_300_000, "1": 16_630_000}
UNKNOWN_NAME = """
[[discover]]
name = "d"
kind = "dns"
dns_name = "workers.invalid"
port = 1
"""
EMPTY = {"HOME": "/nonexistent"}  # it needs nothing of its environment, not even a PATH


def compression() -> str:
    return "9" if thorough() else "1"


@pytest.fixture(scope="module")
def binary(request) -> Path:
    """Built once, and again when a source is newer."""
    if importlib.util.find_spec("PyInstaller") is None:
        pytest.skip("PyInstaller is not installed: pip install 'omni-proxy[dev]'")
    folder = request.config.cache.mkdir(f"binary-{compression()}")
    built = folder / "omni-proxy"
    others = ("tools/build-binary", "tools/docless.py", "tools/import_scan.py", "pyproject.toml")
    made_of = [*sources(), *(ROOT / name for name in others)]
    newest = max(path.stat().st_mtime for path in made_of)
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
    """The binary as a process; at the end nothing of it is left, however it was left."""
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
                    process.terminate()  # which the outer process hands on, unlike a SIGKILL
                    with trio.move_on_after(PATIENCE_SECS):
                        await process.wait()
            nursery.cancel_scope.cancel()


def children(process_id) -> list[int]:
    """Of all its threads."""
    reported = [file.read_text() for file in Path(f"/proc/{process_id}/task").glob("*/children")]
    return [int(child) for each in reported for child in each.split()]


def inner(process) -> int:
    (child,) = children(process.pid)
    return child


def words_of(process_id) -> list[str]:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text().split("\0")
    except OSError:  # it has just ended
        return []


def dataplane_processes(process_id) -> dict[int, list[str]]:
    """The words of each data-plane process of that program, by its id."""
    found = {child: words_of(child) for child in children(process_id)}
    return {child: words for child, words in found.items() if "data-plane-process" in words}


async def until_serving(program, count, without=()):
    """So many data-plane processes, none of `without`, take connections; the ids of theirs."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            ids = await serving(program)
            if len(ids) == count and not set(ids) & set(without):
                return ids
            await trio.sleep(0.02)


async def serving(program):
    """Over a connection of its own: one that was kept may have ended with its process."""
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
    found = next(each for each in environment if each.startswith(b"_PYI_APPLICATION_HOME_DIR="))
    return Path(os.fsdecode(found.partition(b"=")[2]))


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


SEVERAL = "processes = 2"


async def test_one_file_serves_by_several_processes_of_its_own(binary, tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as (worker,):
        file.write_text(toml([worker], more=SEVERAL))
        async with running(binary, "--config", file) as program:
            first, second = await until_serving(program, 2)
            control = inner(program.process)
            assert all(words[0] == str(binary) for words in dataplane_processes(control).values())
            os.kill(first, signal.SIGKILL)
            ids = await until_serving(program, 2, without=[first])
            assert second in ids
            assert dataplane_processes(control).keys() == set(ids)
            await answers(program, worker)
            assert await program.leave() == 0, program.log
            assert not any(map(alive, ids))
            assert "Traceback" not in program.log


async def test_a_sigkill_of_the_one_file_build_leaves_no_process_and_no_file(binary, tmp_path):
    file = tmp_path / "proxy.toml"
    async with workers("a") as (worker,):
        file.write_text(toml([worker], more=SEVERAL))
        async with running(binary, "--config", file) as program:
            ids = await until_serving(program, 2)
            control = inner(program.process)
            folder = unpacked(control)
            url = program.client.base_url
            program.process.kill()
            await ended(program, [control, *ids])
            with trio.fail_after(PATIENCE_SECS):
                while folder.exists():
                    await trio.sleep(0.02)
            # Of a connection that was kept, the next request learns of the end as a broken read.
            async with httpx.AsyncClient(trust_env=False, verify=False) as fresh:
                with pytest.raises(httpx.ConnectError):
                    await fresh.get(url.join("/live"))


async def answers(program, worker):
    async with httpx.AsyncClient(
        base_url=program.client.base_url, trust_env=False, verify=False
    ) as fresh:
        program.client, kept = fresh, program.client
        await kept.aclose()
        await program.until_routable(worker)
        assert (await program.ask()).status_code == 200


async def ended(program, ids):
    with trio.fail_after(PATIENCE_SECS):
        await program.process.wait()
        while any(map(alive, ids)):
            await trio.sleep(0.02)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Our own modules only, and the words that run them: what they need is where the tests are."""
    folder = tmp_path_factory.mktemp("archive")
    installed, packed = folder / "installed", folder / "omni-proxy.pyz"
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "omni_proxy", installed / "omni_proxy", ignore=unwanted)
    pack(installed, packed)
    shutil.rmtree(installed)
    return packed


@pytest.mark.parametrize("home", ["a home", "no home"])
async def test_an_archive_serves_by_several_processes_of_its_own(archive, tmp_path, home):
    file, cache, temporary = tmp_path / "proxy.toml", tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    if home == "no home":
        cache.touch()  # no folder can be made in it
    env = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    async with workers("a") as (worker,):
        file.write_text(toml([worker], more=SEVERAL))
        words = ("-P", archive, "--config", file)
        async with running(sys.executable, *words, env=env, cwd="/") as program:
            ids = await until_serving(program, 2)
            assert all(
                str(archive) in dataplane_processes(program.process.pid)[child] for child in ids
            )
            os.kill(ids[0], signal.SIGKILL)
            ids = await until_serving(program, 2, without=ids[:1])
            unpacked_here = list(temporary.glob("*/omni_proxy"))
            assert len(unpacked_here) == (home == "no home")  # one for all of them
            await answers(program, worker)
            program.process.kill()
            await ended(program, ids)


def test_one_file_starts_where_the_locale_has_a_charset_of_its_own(binary, tmp_path):
    if shutil.which("localedef") is None:
        pytest.skip("localedef is not installed")
    for language, charset in (("ja_JP", "EUC-JP"), ("zh_CN", "GBK"), ("ru_RU", "KOI8-R")):
        words = ["localedef", "-i", language, "-f", charset, tmp_path / f"{language}.{charset}"]
        made = subprocess.run(words, capture_output=True, text=True, check=False)
        if made.returncode > 1:  # 1: with warnings
            pytest.skip(made.stderr)
        env = EMPTY | {"LOCPATH": str(tmp_path), "LC_ALL": f"{language}.{charset}"}
        reported = subprocess.run(
            [binary, "--version"], capture_output=True, timeout=60, check=False, env=env
        )
        assert (reported.returncode, reported.stderr) == (0, b""), charset


def test_one_file_is_small(binary):
    assert binary.stat().st_size < MOST_BYTES[compression()]


def test_one_file_simulates_and_draws(binary, tmp_path):
    """What a command imports when it runs must be in it, too."""
    picture = tmp_path / "policies.svg"
    words = ["--workload", "uniform", "--requests", "20", "--policies", "random", "--plot", picture]
    done = subprocess.run(
        [binary, "simulate", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "random" in picture.read_text()


def test_one_file_has_every_command(binary, tmp_path):
    def run(*words):
        return subprocess.run(
            [binary, *words], capture_output=True, text=True, timeout=60, check=False, env=EMPTY
        )

    for words in (["--version"], ["top", "--help"], ["replica", "--help"], ["completion", "bash"]):
        reported = run(*words)
        assert (reported.returncode, reported.stderr) == (0, ""), words
        assert "omni-proxy" in reported.stdout
    reported = run("status", "--url", "http://127.0.0.1:1")
    assert reported.returncode == 2
    assert "cannot connect to" in reported.stderr
    reported = run("replica", "--model", "tiny")
    assert reported.returncode == 1
    assert "pip install 'omni-proxy[replica]'" in reported.stderr
