import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.program_forkserver import forking_interpreter
from tests.promises.support.fleet_program import (
    PATIENCE_SECS,
    chat,
    program,
    put,
    routable,
    toml,
    workers,
)

ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
ENV.pop("SGLANG_OMNI_ADMIN_KEY", None)
KEY = "open sesame"


async def ask(*arguments, stdin=b""):
    """Exit status, stdout and stderr of one command."""
    command = [forking_interpreter(), "-m", "omni_proxy", *map(str, arguments)]
    with trio.fail_after(PATIENCE_SECS):
        done = await trio.run_process(
            command, stdin=stdin, capture_stdout=True, capture_stderr=True, check=False, env=ENV,
            cwd=ROOT,
        )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture
async def proxy(tmp_path):
    """A proxy with two workers, a key and an access log; `at` has the options that address it."""
    file, log = tmp_path / "proxy.toml", tmp_path / "access.log"
    async with workers("a", "b") as fleet:
        more = f'access_log = "{log}"\nlog_format = "json"\n[admin]\napi_key = "{KEY}"\n'
        put(file, toml(fleet, more=more))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            running.fleet, running.file, running.access = fleet, file, log
            running.at = ("--url", str(running.client.base_url), "--api-key", KEY)
            yield running


async def test_status_prints_the_state_and_sets_the_exit_status(proxy):
    assert (await proxy.ask()).status_code == 200
    status, out, _ = await ask("status", *proxy.at)
    assert status == 0
    assert f"at {proxy.at[1]}: ready" in out
    assert "2 of 2 take requests" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    body = json.loads((await ask("status", "--json", *proxy.at))[1])
    assert {row["url"] for row in body["fleet"]} == {worker.url for worker in proxy.fleet}
    for worker in proxy.fleet:
        await ask("workers", "disable", worker.url, *proxy.at)
    status, out, _ = await ask("status", *proxy.at)
    assert status == 1
    assert "NOT READY" in out
    assert "2 disabled" in out


async def test_commands_report_a_wrong_key_and_an_invalid_file(proxy):
    status, _, err = await ask("status", "--url", proxy.at[1])
    assert (status, "requires the admin key" in err) == (2, True)
    status, _, err = await ask("status", "--url", proxy.at[1], "--api-key", "no")
    assert (status, "rejects the admin key" in err) == (2, True)
    put(proxy.file, "[server]\nprot = 1\n")
    proxy.client.headers["authorization"] = f"Bearer {KEY}"
    await proxy.until("/status", lambda body: body["last_reload"].get("error"))
    _, out, _ = await ask("status", *proxy.at)
    text = " ".join(out.split())
    assert "refused by file" in text
    assert "proxy.toml line 2 server.prot: unknown key" in text


async def test_the_workers_command_drains_enables_removes_and_adds(proxy):
    a, b = proxy.fleet
    a.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(2):  # one of them stays in flight at a
            nursery.start_soon(partial(proxy.client.post, "/v1/chat/completions", json=chat()))
        await a.halfway.wait()
        status, out, _ = await ask("workers", "drain", a.url, *proxy.at)
        assert status == 0
        assert out.startswith(f"{a.url}: draining, 1 in flight, 1 min left, by omni-proxy-cli/")
        async with trio.open_nursery() as waiting:
            waiting.start_soon(_drained, proxy, a)
            await proxy.until("/workers", lambda body: routable(body) == {b.url})
            a.gate.set()
    assert (await ask("workers", "enable", a.url, *proxy.at))[0] == 0
    await proxy.until_routable(a, b)
    assert (await ask("workers", "remove", b.url, *proxy.at))[1] == f"removed {b.url}\n"
    await proxy.until_routable(a)
    assert (await ask("workers", "add", b.url.removeprefix("http://"), *proxy.at))[0] == 0
    await proxy.until_routable(a, b)
    status, out, _ = await ask("workers", *proxy.at)
    assert status == 0
    assert {line.split()[0] for line in out.splitlines()[1:]} == {a.url, b.url}
    assert (await ask("workers", "disable", "unknown", *proxy.at))[0] == 1


async def _drained(proxy, worker):
    status, out, _ = await ask("workers", "drain", "--wait", worker.url, *proxy.at)
    assert status == 0
    assert out.startswith(f"{worker.url}: drained, 0 in flight, by omni-proxy-cli/")


def is_logged(file):
    return file.exists() and '"/v1/chat/completions"' in file.read_text()


async def test_explain_shows_the_pick_and_logs_shows_the_worker(proxy):
    body = json.dumps(chat()).encode()
    status, out, _ = await ask("explain", *proxy.at, stdin=body)
    assert status == 0
    assert re.search(r"^goes to   http://127.0.0.1:\d+$", out, re.MULTILINE)
    status, _, err = await ask("explain", "--path", "/nowhere", *proxy.at, stdin=body)
    assert (status, "is not a model route" in err) == (1, True)
    await proxy.ask()
    await proxy.until("/live", lambda _: is_logged(proxy.access))
    for options in (proxy.at, ("--config", proxy.file)):
        status, out, _ = await ask("logs", *options)
        assert status == 0
        assert "POST /v1/chat/completions" in out


@asynccontextmanager
async def terminal(*arguments):
    """Run `omni-proxy top` on a pseudo-terminal with 24 rows of 80 columns."""
    controller, tty = pty.openpty()
    fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = await trio.lowlevel.open_process(
        [forking_interpreter(), "-m", "omni_proxy", "top", *arguments],
        stdin=tty, stdout=tty, stderr=subprocess.PIPE, env=ENV, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    os.close(tty)
    os.set_blocking(controller, False)
    top = Top(process, controller)
    try:
        yield top
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await process.stderr.aclose()
        top.close()


class Top:
    def __init__(self, process, descriptor):
        self.process, self._descriptor, self.screen = process, descriptor, ""

    def press(self, keys):
        os.write(self._descriptor, keys)

    async def until(self, pattern):
        """Wait until output since the last match has this pattern."""
        with trio.fail_after(PATIENCE_SECS):
            while not (found := re.search(pattern, self.screen)):
                await trio.lowlevel.wait_readable(self._descriptor)
                self.screen += os.read(self._descriptor, 65536).decode(errors="replace")
        self.screen = self.screen[found.end() :]

    async def ended(self):
        with trio.fail_after(PATIENCE_SECS):
            return await self.process.wait()

    def close(self):
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


async def test_top_shows_and_changes_the_fleet_and_restores_the_terminal(proxy):
    async with terminal(*proxy.at) as top:
        await top.until(r"\x1b\[\?1049h")  # the alternate screen
        await top.until("2 of 2 take requests")
        top.press(b"\x1b[C")  # by name
        top.press(b"d")
        await top.until(r"disable 127\S+\?  y: yes")
        top.press(b"y")
        await top.until("1 disabled")
        assert len(routable(await proxy.get_json("/workers"))) == 1
        top.press(b"o")
        await top.until("no worker has problems")
        top.press(b"q")
        await top.until(r"\x1b\[\?1049l")
        assert await top.ended() == 0


async def test_top_shows_that_the_connection_is_lost(proxy):
    async with terminal(*proxy.at) as top:
        await top.until("2 of 2 take requests")
        assert await proxy.leave() == 0
        await top.until("NOT CONNECTED, retrying")
        top.press(b"\x03")
        assert await top.ended() == 0


async def test_top_ends_with_its_terminal_and_the_proxy_keeps_serving(proxy):
    async with terminal(*proxy.at) as top:
        await top.until("2 of 2 take requests")
        top.close()
        await top.ended()
    assert (await proxy.ask()).status_code == 200


async def test_top_without_a_terminal_requires_once_and_prints_one_frame(proxy):
    status, out, _ = await ask("top", "--once", *proxy.at)
    assert status == 0
    assert "2 of 2 take requests" in out
    status, _, err = await ask("top", *proxy.at)
    assert (status, "--once" in err) == (1, True)
