"""The commands of the guides, run as they are written against a running proxy.

Only addresses and paths differ: the port, and the workers of the examples. Commands that do not
end, or that need another program, are in ELSEWHERE with the tests that run them.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest
import trio

from tests.ports import free_port
from tests.program_forkserver import forking_interpreter
from tests.promises.support.fleet_program import PATIENCE_SECS, program, put, toml, workers
from tests.tree import ROOT

PAGES = ("README.md", "docs/start.md", "docs/install.md", "docs/migration.md", "docs/operations.md")
ELSEWHERE = {
    "omni-proxy --config": "tests/promises/operations/test_reload.py",
    "omni-proxy --worker-urls": "tests/promises/operations/test_state_file.py",
    "omni-proxy launch": "tests/promises/launch/test_launch.py",
    "omni-proxy replica": "tests/promises/replica/test_replica_life.py",
    "pip install": "tests/promises/launch/test_binary.py",  # which packs what pip would install
    "tools/build-": "tests/promises/launch/test_binary.py",
    "tools/run": "tests/promises/launch/test_launch.py",  # fetches a model: that test covers its parts
    "tools/test": "tests/test_commands.py",
    "tools/trainer": "tests/promises/weights/test_sync_forms.py",
    "python -m tools.bench": "tests/tools/test_bench.py",
}
CLIENT_COMMANDS = ("status", "top", "workers", "explain", "logs", "trace")


def documented(page):
    """The lines of the page's shell blocks, without those in ELSEWHERE."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line]
    return [line for line in lines if not line.startswith(tuple(ELSEWHERE))]


def adapted(line, fleet, url, folder):
    """The line with the test's addresses and paths, without its comment."""
    line = re.sub(r"\s+# .*", "", line)
    host = url.removeprefix("http://")
    for example, actual in (
        ("127.0.0.1:30000", host),
        ("http://127.0.0.1:31303", fleet[2].url),
        ("http://10.0.0.3:8000", fleet[2].url),
        ("http://10.0.0.1:8000", fleet[0].url),
        ("127.0.0.1:31000", fleet[0].url.removeprefix("http://")),
        ("/run/omni-proxy/admin.sock", str(folder / "admin.sock")),
        ("curl ", "curl -sS --fail-with-body "),
    ):
        line = line.replace(example, actual)
    words = shlex.split(line)
    if "omni-proxy" in words:
        command = words[words.index("omni-proxy") + 1]
        named = {"--url", "--config"} & set(words)
        line += f" --url {url}" if command in CLIENT_COMMANDS and not named else ""
        line += " --once" if command == "top" else ""  # there is no terminal here
    return line


async def output_of(line, folder):
    """The output of a command; one with --follow is ended after its first output."""
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    process = await trio.lowlevel.open_process(
        ["bash", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ,
        cwd=folder, start_new_session=True,
    )  # fmt: skip
    out = b""
    with trio.fail_after(PATIENCE_SECS):
        async for piece in process.stdout:
            out += piece
            if "--follow" in line:
                os.killpg(process.pid, signal.SIGTERM)
        errors = b"".join([piece async for piece in process.stderr])
        status = await process.wait()
    assert status == 0 or "--follow" in line, (line, out, errors)
    return out.decode()


@pytest.mark.parametrize("page", PAGES)
async def test_each_command_of_the_page_succeeds(page, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "omni-proxy"
    command.write_text(f'#!/bin/sh\nexec {forking_interpreter()} -m omni_proxy "$@"')
    command.chmod(0o755)
    (tmp_path / "request.json").write_text('{"messages": []}')
    file, admin = tmp_path / "proxy.toml", tmp_path / "admin.sock"
    more = f'access_log = "{tmp_path / "access.log"}"\n'
    if page == "docs/operations.md":
        more += f'[admin]\nlisten = "unix:{admin}"\n'
    async with workers("a", "b", "c") as fleet:
        put(file, toml(fleet[:2], port=free_port(), more=more))
        async with program("--config", file) as running:
            await running.until_routable(*fleet[:2])
            await running.ask()
            url = str(running.client.base_url).rstrip("/")
            for line in documented(page):
                assert await output_of(adapted(line, fleet, url, tmp_path), tmp_path), line


def test_the_tests_that_run_the_other_commands_exist():
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())
    assert all(documented(page) for page in PAGES)
