import re
import subprocess
from pathlib import Path

import pytest
import trio

from tests.program_forkserver import forking_interpreter
from tests.promises.support.clients import CHAT
from tests.promises.support.fakes import PATIENCE_SECS
from tests.promises.support.fleet_program import program, put, toml, urls

# Text appended to a valid file, and what its error names: key path, reason, suggestion.
ERRORS = {
    "unknown key": ("[routing]\npolcy = 'random'", "routing.polcy", "unknown key", "`policy`"),
    "unknown table": ("[sever]\nport = 1", "sever", "unknown key", "`server`"),
    "wrong type": ("[routing]\nmodel = 6", "routing.model", "expected a string", ""),
    "out of range": ("[routing]\nmax_total_retries = -1", "routing.max_total_retries", "-1", ""),
    "unknown choice": ("[routing]\npolicy = 'randm'", "routing.policy", "randm", "`random`"),
    "duplicate worker": (
        "[[workers]]\nurl = 'http://LOCALHOST:9'\n[[workers]]\nurl = 'http://localhost:9/'",
        "workers[2].url", "http://localhost:9", "",
    ),
    "metadata address": (
        "[[workers]]\nurl = 'http://169.254.169.254'", "workers[1].url", "link-local", "",
    ),
    "no toml": ("[routing\npolicy = 'random'", "", "", ""),
    "no URL": (
        "[routing]\nvoice_owner = 'localhost'", "routing.voice_owner", "scheme", "",
    ),
}  # fmt: skip
ROOT = Path(__file__).parents[3]


async def refused_start(*arguments):
    """The output of a program that refuses to start."""
    command = [forking_interpreter(), "-m", "omni_proxy", *map(str, arguments)]
    with trio.fail_after(PATIENCE_SECS):
        process = await trio.run_process(
            command, capture_stdout=True, stderr=subprocess.STDOUT, check=False, cwd=ROOT
        )
    assert process.returncode == 2
    output = process.stdout.decode()
    assert "Traceback" not in output
    assert "listening" not in output
    return output


def check(message, file, text, case):
    """The message has a line with file, line number, key path, reason and suggestion."""
    appended, path, reason, suggestion = case
    match = re.search(rf"^{re.escape(str(file))}:(\d+): (.*)$", message, re.MULTILINE)
    assert match, message
    first = text.count("\n", 0, text.rindex(appended)) + 1
    assert first <= int(match[1]) <= first + appended.count("\n")
    assert match[2].startswith(path)
    assert reason.lower() in match[2].lower()
    assert suggestion in match[2]


@pytest.mark.parametrize("name", ["unknown key", "wrong type", "duplicate worker", "no toml"])
async def test_an_invalid_file_prevents_the_start_and_binds_nothing(tmp_path, worker, name):
    file = tmp_path / "proxy.toml"
    text = toml([worker]) + ERRORS[name][0] + "\n"
    put(file, text)
    check(await refused_start("--config", file), file, text, ERRORS[name])


async def test_all_problems_of_a_file_are_reported_at_once(tmp_path, worker):
    file = tmp_path / "proxy.toml"
    put(file, toml([worker]) + "[routing]\npolcy = 1\nmodel = 2\n[admin]\nkey = 3\n")
    output = await refused_start("--config", file)
    assert [path in output for path in ("routing.polcy", "routing.model", "admin.key")] == [
        True
    ] * 3


@pytest.mark.parametrize("problem", ["missing", "folder", "bytes", "empty name"])
async def test_a_file_that_cannot_be_read_prevents_the_start(tmp_path, problem):
    file = tmp_path / "proxy.toml"
    if problem == "folder":
        file.mkdir()
    elif problem == "bytes":
        file.write_bytes(b"[server]\nport = 0 # \xff\xfe\n")
    elif problem == "empty name":
        file = Path()
    output = await refused_start("--config", file)
    assert str(file) in output


async def test_an_invalid_flag_prevents_the_start():
    output = await refused_start("--worker-urls", "http://127.0.0.1:99999", "--policy", "rnd")
    assert '--worker-urls: "http://127.0.0.1:99999": port out of range 1-65535' in output


async def test_an_invalid_file_at_a_reload_changes_nothing_and_its_error_is_shown(tmp_path, worker):
    file = tmp_path / "proxy.toml"
    good = toml([worker])
    put(file, good)
    async with program("--config", file) as running:
        await running.until_routable(worker)
        before = (await running.get_json("/config"))["config"]
        for case in ERRORS.values():
            text = f"{good}{case[0]}\n"
            put(file, text)
            refused = await running.client.post("/reload")
            assert refused.status_code == 422
            for path in ("/config", "/status"):
                last = (await running.get_json(path))["last_reload"]
                assert last["outcome"] == "refused"
                check(last["error"]["message"], file, text, case)
            body = await running.get_json("/config")
            assert (body["config"], body["revision"]) == (before, 1)
            assert urls(await running.get_json("/workers")) == [worker.url]
            assert (await running.ask()).status_code == 200
            put(file, good)
            assert (await running.client.post("/reload")).status_code == 200
            for path in ("/config", "/status"):
                assert "error" not in (await running.get_json(path))["last_reload"]
        assert running.log.count("config_refused") >= len(ERRORS)


async def test_a_change_over_http_does_not_hide_that_the_file_is_invalid(tmp_path, worker):
    file = tmp_path / "proxy.toml"
    put(file, toml([worker]))
    async with program("--config", file) as running:
        put(file, "[server]\nprt = 1\n")
        assert (await running.client.post("/reload")).status_code == 422
        added = await running.client.post("/workers", json={"url": "http://127.0.0.1:1"})
        assert added.status_code == 200
        assert "error" in (await running.get_json("/config"))["last_reload"]
        assert len(urls(await running.get_json("/workers"))) == 2


async def test_a_reload_of_an_empty_file_removes_all_workers(tmp_path, worker):
    file = tmp_path / "proxy.toml"
    put(file, toml([worker]))
    async with program("--config", file, "--port", "0") as running:
        await running.until_routable(worker)
        put(file, "")
        assert (await running.client.post("/reload")).status_code == 200
        assert urls(await running.get_json("/workers")) == []
        refused = await running.client.post(
            "/v1/chat/completions", content=CHAT, headers={"content-type": "application/json"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_workers")
