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
from tests.promises.fleet_program import PATIENCE_SECS, chat, program, put, routable, toml, workers

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
ENV.pop("SGLANG_OMNI_ADMIN_KEY", None)
KEY = "open sesame"


async def ask(*words, stdin=b""):
    """Status, stdout and stderr of one command."""
    command = [forking_interpreter(), "-m", "omni_proxy", *map(str, words)]
    with trio.fail_after(PATIENCE_SECS):
        done = await trio.run_process(
            command, stdin=stdin, capture_stdout=True, capture_stderr=True, check=False, env=ENV,
            cwd=ROOT,
        )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture
async def place(tmp_path):
    """A proxy with two workers, a key and an access log; and the words that find it."""
    file, log = tmp_path / "proxy.toml", tmp_path / "access.log"
    async with workers("a", "b") as fleet:
        more = f'access_log = "{log}"\nlog_format = "json"\n[admin]\napi_key = "{KEY}"\n'
        put(file, toml(fleet, more=more))
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            running.fleet, running.file, running.access = fleet, file, log
            running.at = ("--url", str(running.client.base_url), "--api-key", KEY)
            yield running


async def test_status_prints_the_state_and_sets_the_exit_status(place):
    assert (await place.ask()).status_code == 200
    status, out, _ = await ask("status", *place.at)
    assert status == 0
    assert f"at {place.at[1]}: ready" in out
    assert "2 of 2 take requests" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    body = json.loads((await ask("status", "--json", *place.at))[1])
    assert {each["url"] for each in body["fleet"]} == {each.url for each in place.fleet}
    for worker in place.fleet:
        await ask("workers", "disable", worker.url, *place.at)
    status, out, _ = await ask("status", *place.at)
    assert status == 1
    assert "NOT READY" in out
    assert "2 disabled" in out


async def test_a_wrong_key_and_a_refused_file_are_reported(place):
    status, _, err = await ask("status", "--url", place.at[1])
    assert (status, "requires the admin key" in err) == (2, True)
    status, _, err = await ask("status", "--url", place.at[1], "--api-key", "no")
    assert (status, "rejects the admin key" in err) == (2, True)
    put(place.file, "[server]\nprot = 1\n")
    place.client.headers["authorization"] = f"Bearer {KEY}"
    await place.until("/status", lambda body: body["last_reload"].get("error"))
    _, out, _ = await ask("status", *place.at)
    words = " ".join(out.split())
    assert "refused by file" in words
    assert "proxy.toml line 2 server.prot: unknown key" in words


async def test_a_worker_is_drained_enabled_removed_and_added(place):
    a, b = place.fleet
    a.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(2):  # one of them waits at a
            nursery.start_soon(partial(place.client.post, "/v1/chat/completions", json=chat()))
        await a.halfway.wait()
        status, out, _ = await ask("workers", "drain", a.url, *place.at)
        assert status == 0
        assert out.startswith(f"{a.url}: draining, 1 in flight, 1 min left, by omni-proxy-cli/")
        async with trio.open_nursery() as waiting:
            waiting.start_soon(_drained, place, a)
            await place.until("/workers", lambda body: routable(body) == {b.url})
            a.gate.set()
    assert (await ask("workers", "enable", a.url, *place.at))[0] == 0
    await place.until_routable(a, b)
    assert (await ask("workers", "remove", b.url, *place.at))[1] == f"removed {b.url}\n"
    await place.until_routable(a)
    assert (await ask("workers", "add", b.url.removeprefix("http://"), *place.at))[0] == 0
    await place.until_routable(a, b)
    status, out, _ = await ask("workers", *place.at)
    assert status == 0
    assert {line.split()[0] for line in out.splitlines()[1:]} == {a.url, b.url}
    assert (await ask("workers", "disable", "unknown", *place.at))[0] == 1


async def _drained(place, worker):
    status, out, _ = await ask("workers", "drain", "--wait", worker.url, *place.at)
    assert status == 0
    assert out.startswith(f"{worker.url}: drained, 0 in flight, by omni-proxy-cli/")


def is_logged(file):
    return file.exists() and '"/v1/chat/completions"' in file.read_text()


async def test_explain_shows_the_pick_and_logs_shows_the_worker(place):
    body = json.dumps(chat()).encode()
    status, out, _ = await ask("explain", *place.at, stdin=body)
    assert status == 0
    assert re.search(r"^goes to   http://127.0.0.1:\d+$", out, re.MULTILINE)
    status, _, err = await ask("explain", "--path", "/nowhere", *place.at, stdin=body)
    assert (status, "is not a model route" in err) == (1, True)
    await place.ask()
    await place.until("/live", lambda _: is_logged(place.access))
    for where in (place.at, ("--config", place.file)):
        status, out, _ = await ask("logs", *where)
        assert status == 0
        assert "POST /v1/chat/completions" in out


@asynccontextmanager
async def terminal(*words):
    """`omni-proxy top` on a terminal of 24 rows of 80; `screen` is all that it has drawn."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = await trio.lowlevel.open_process(
        [forking_interpreter(), "-m", "omni_proxy", "top", *words],
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=ENV, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    top = Top(process, ours)
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
        """Drawn since the last time that somebody looked."""
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


async def test_top_shows_the_fleet_changes_it_and_gives_the_terminal_back(place):
    async with terminal(*place.at) as top:
        await top.until(r"\x1b\[\?1049h")  # a screen of its own
        await top.until("2 of 2 take requests")
        top.press(b"\x1b[C")  # by name
        top.press(b"d")
        await top.until(r"disable 127\S+\?  y: yes")
        top.press(b"y")
        await top.until("1 disabled")
        assert len(routable(await place.get_json("/workers"))) == 1
        top.press(b"o")
        await top.until("no worker has problems")
        top.press(b"q")
        await top.until(r"\x1b\[\?1049l")
        assert await top.ended() == 0


async def test_top_reports_a_lost_proxy(place):
    async with terminal(*place.at) as top:
        await top.until("2 of 2 take requests")
        assert await place.leave() == 0
        await top.until("NOT CONNECTED, retrying")
        top.press(b"\x03")
        assert await top.ended() == 0


async def test_a_terminal_that_dies_ends_top_and_costs_nothing(place):
    async with terminal(*place.at) as top:
        await top.until("2 of 2 take requests")
        top.close()
        await top.ended()
    assert (await place.ask()).status_code == 200


async def test_top_prints_one_frame_where_there_is_no_terminal(place):
    status, out, _ = await ask("top", "--once", *place.at)
    assert status == 0
    assert "2 of 2 take requests" in out
    status, _, err = await ask("top", *place.at)
    assert (status, "--once" in err) == (1, True)
