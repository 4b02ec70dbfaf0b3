"""What people are shown in the guides, typed as it stands there, at a proxy that runs.

Only the places differ: the port, and the workers of the examples. What can't end, or is another
program's business, is named in ELSEWHERE with the tests that run it.
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
from tests.promises.fleet_program import PATIENCE_SECS, program, put, toml, workers
from tests.tree import ROOT

PAGES = ("README.md", "docs/start.md", "docs/install.md", "docs/migration.md", "docs/operations.md")
ELSEWHERE = {
    "omni-proxy --config": "tests/promises/test_reload.py",
    "omni-proxy --worker-urls": "tests/promises/test_state_file.py",
    "omni-proxy launch": "tests/promises/test_launch.py",
    "omni-proxy replica": "tests/promises/test_replica_life.py",
    "pip install": "tests/promises/test_binary.py",  # the archive is made of what pip installs
    "tools/build-": "tests/promises/test_binary.py",
    "tools/run": "tests/promises/test_launch.py",  # fetches a model: its parts are tested there
    "tools/test": "tests/test_commands.py",
    "tools/trainer": "tests/promises/test_sync_forms.py",
    "python -m tools.bench": "tests/tools/test_bench.py",
}
TALKING = ("status", "top", "workers", "explain", "logs", "trace")


def shown(page):
    """The lines of the page's shell blocks, without those that run elsewhere."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line]
    return [line for line in lines if not line.startswith(tuple(ELSEWHERE))]


def typed(line, fleet, url, folder):
    """The line with our places in it, without its comment: more words may follow."""
    line = re.sub(r"\s+# .*", "", line)
    host = url.removeprefix("http://")
    for example, ours in (
        ("127.0.0.1:30000", host),
        ("http://127.0.0.1:31303", fleet[2].url),
        ("http://10.0.0.3:8000", fleet[2].url),
        ("http://10.0.0.1:8000", fleet[0].url),
        ("127.0.0.1:31000", fleet[0].url.removeprefix("http://")),
        ("/run/omni-proxy/admin.sock", str(folder / "admin.sock")),
        ("curl ", "curl -sS --fail-with-body "),
    ):
        line = line.replace(example, ours)
    words = shlex.split(line)
    if "omni-proxy" in words:
        command = words[words.index("omni-proxy") + 1]
        named = {"--url", "--config"} & set(words)
        line += f" --url {url}" if command in TALKING and not named else ""
        line += " --once" if command == "top" else ""  # here is no terminal that it could fill
    return line


async def output_of(line, folder):
    """What it says on stdout; a command that follows is ended once it has said something."""
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
        complaint = b"".join([piece async for piece in process.stderr])
        status = await process.wait()
    assert status == 0 or "--follow" in line, (line, out, complaint)
    return out.decode()


@pytest.mark.parametrize("page", PAGES)
async def test_each_command_of_the_page_does_its_work(page, tmp_path):
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
            for line in shown(page):
                assert await output_of(typed(line, fleet, url, tmp_path), tmp_path), line


def test_what_is_run_elsewhere_is_run_by_tests_that_are_there():
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())
    assert all(shown(page) for page in PAGES)
