import importlib.util
import os
import signal
import socket
import sys
from pathlib import Path

import openai
import pytest
import trio

from omni_proxy.dataplane.accept.listener import open_socket
from omni_proxy.replica.model_file import MODELS, cache_folder
from tests.ports import free_run
from tests.processes import alive, until_gone
from tests.promises.support.fleet_program import PROBES, Program, program, starting

MODEL = "smollm2-135m"
MODEL_FILE = cache_folder(os.environ) / MODELS[MODEL].file
REPLICA = """
import http.server, os, sys
gate = sys.argv[2] if len(sys.argv) > 2 else __file__
class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.say(b'{"loading": true}', 200 if os.path.exists(gate) else 503)
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.say(b'{"pid": %d}' % os.getpid())
    def say(self, body, status=200):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


@pytest.fixture
def base_port() -> int:
    """The port of the first replica; the next is the second's, and the third `launch`'s own."""
    return free_run(3)


@pytest.fixture
def file(tmp_path, base_port):
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    command = f'["{sys.executable}", "-S", "{script}", "{{port}}"]'
    path = tmp_path / "proxy.toml"
    path.write_text(launch(command, base_port))
    return path


def launch(command: str, base_port: int) -> str:
    return (
        f'[server]\nport = 0\n[routing]\npolicy = "least_request"\n{PROBES}'
        f'[[launch]]\nname = "local"\ncommand = {command}\nreplicas = 2\nbase_port = {base_port}\n'
        f'model = "{MODEL}"\ncapabilities = ["chat", "streaming"]\n'
    )


async def until_ready(running: Program) -> list[dict]:
    body = await running.until(
        "/status",
        lambda body: (
            body["fleet"]["routable_workers"] == 2
            and [replica["state"] for replica in body["launch"]] == ["ready", "ready"]
        ),
    )
    return body["launch"]


async def test_a_killed_replica_leaves_rotation_and_returns_after_its_restart(file):
    async with program("--config", file) as running:
        first, second = await until_ready(running)
        os.kill(first["pid"], signal.SIGKILL)
        body = await running.until("/workers", lambda body: body["workers"][0]["held_by"])
        killed = body["workers"][0]
        assert not killed["routable"]
        assert "SIGKILL" in killed["last_error"]  # although probes fail meanwhile, too
        assert killed["held_by"] == ["launch"]
        answers = [await running.ask() for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 6
        assert first["pid"] not in {answer.json()["pid"] for answer in answers}
        restarted, other = await until_ready(running)
        assert (restarted["restarts"], other["restarts"]) == (1, 0)
        assert restarted["pid"] != first["pid"]
        assert "SIGKILL" in restarted["last_error"]
        used = {(await running.ask()).json()["pid"] for _ in range(4)}
        assert used == {restarted["pid"], second["pid"]}


async def test_a_sigterm_of_the_proxy_stops_its_replicas(file):
    async with program("--config", file) as running:
        replicas = await until_ready(running)
    assert not any(alive(replica["pid"]) for replica in replicas)


def replicas_of(file):
    """The ids of processes that run the replica script beside this configuration file."""
    script = str(file.with_name("replica.py")).encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_line = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if script in command_line:
            pids.append(int(path.parent.name))
    return pids


@pytest.mark.parametrize("message", ["proxy_started", "listener_opened"])
async def test_a_sigterm_during_the_start_leaves_no_replica_behind(file, message):
    async with starting("--config", file) as running:
        await running.until_logged(message)
        assert await running.leave() in (0, -signal.SIGTERM)
        await until_gone(*replicas_of(file))
    assert not replicas_of(file)


async def test_a_sigkill_of_the_proxy_leaves_no_orphan(file):
    async with program("--config", file) as running:
        replicas = await until_ready(running)
        running.process.kill()
        await running.process.wait()
        await until_gone(*(replica["pid"] for replica in replicas))


async def test_a_removed_group_is_stopped_and_an_added_one_started(file):
    text = file.read_text()
    async with program("--config", file) as running:
        replicas = await until_ready(running)
        file.write_text("[server]\nport = 0\n")
        await until_gone(*(replica["pid"] for replica in replicas))
        await running.until("/status", lambda body: body["launch"] == [])
        file.write_text(text)
        restarted = await until_ready(running)
        assert {replica["pid"] for replica in restarted}.isdisjoint(
            replica["pid"] for replica in replicas
        )


@pytest.fixture
def arguments(tmp_path, base_port):
    """Of `omni-proxy launch` with two replicas; each is ready once the file of its index exists."""
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    command = f"{sys.executable} -S {script} {{port}} {tmp_path}/{{index}}"
    return [
        "launch", "--dp-size", "2", "--port", str(base_port + 2),
        "--worker-base-port", str(base_port), "--command", command,
    ]  # fmt: skip


async def test_launch_opens_its_port_when_every_replica_is_ready(arguments, tmp_path, base_port):
    async with starting(*arguments) as running:
        await running.until_logged(r"starting 2 replicas\n")
        address = ("127.0.0.1", base_port + 2)
        (tmp_path / "1").touch()
        await running.until_logged(
            rf"replica 1 of 2 is ready after \d+\.\d s: \S+:{base_port + 1}\n"
        )
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with pytest.raises(OSError, match="in use"):
            open_socket(*address)
        (tmp_path / "0").touch()
        await running.until_logged(rf"replica 2 of 2 is ready after \d+\.\d s: \S+:{base_port}\n")
        await running.until_logged(rf"serving on http://127.0.0.1:{base_port + 2}\n")
        await running.arrive()
        assert (await running.ask()).status_code == 200
        assert len((await running.get_json("/status"))["launch"]) == 2
    assert "WARNING" not in running.log
    assert "loading" not in running.log


async def test_launch_reports_a_port_in_use_at_once(arguments, tmp_path, base_port):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", base_port + 2))
        other.listen()
        async with starting(*arguments) as running:
            await running.until_logged(
                f'listen_failed address=127.0.0.1:{base_port + 2} error="Address already in'
            )
            with trio.fail_after(30):
                assert await running.process.wait() == 1
    assert "replica" not in running.log


async def test_ctrl_c_while_launch_waits_stops_everything(arguments, tmp_path, base_port):
    (tmp_path / "0").touch()
    async with starting(*arguments) as running:
        await running.until_logged("replica 1 of 2 is ready")
        running.process.send_signal(signal.SIGINT)
        with trio.fail_after(30):
            assert await running.process.wait() == 0
        for port in (base_port, base_port + 1, base_port + 2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
    assert "serving on" not in running.log


async def test_a_replica_that_fails_is_reported_with_its_reason_and_restarted(arguments, base_port):
    script = "echo no such model >&2; exit 3"
    async with starting(*arguments[:-1], f"sh -c '{script}'") as running:
        for port in (base_port, base_port + 1):
            await running.until_logged(
                rf"replica \S+:{port} is not ready: process ended with exit status 3; "
                r"last line: no such model; it is tried again\n"
            )
        await running.until_logged(r"(?s)(launch\[0\] no such model.*){2}")
        assert await running.leave() == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "sh -c 'echo unrecognized arguments: --allow-auto-truncate >&2; exit 2'",
            "exit status 2; last line: unrecognized arguments: --allow-auto-truncate",
        ),
        ("sh -c 'echo No module named sglang >&2; exit 1'", "No module named sglang"),
        ("/nowhere/engine --port {port}", "cannot start `/nowhere/engine`: No such file"),
    ],
    ids=["refuses its flags", "not installed", "no such program"],
)
async def test_launch_exits_at_once_with_the_engines_error_if_a_restart_cannot_help(
    arguments, base_port, command, message
):
    async with starting(*arguments[:-1], command) as running:
        with trio.fail_after(30):
            assert await running.process.wait() == 1
        await running.until_logged(r"giving up: no replica can be started\n")
        assert message in running.log
        assert "; it is tried again" not in running.log
        assert "serving on" not in running.log


async def test_launch_exits_if_no_replica_is_ready_in_time(arguments, base_port):
    more = ("--worker-startup-timeout-secs", "1")
    async with starting(*arguments, *more) as running:  # no file exists that makes a replica ready
        with trio.fail_after(30):
            assert await running.process.wait() == 1
        await running.until_logged("giving up: no replica was ready within 1 s")
        assert "not ready after 1 s: GET /health answered 503" in running.log
        for port in (base_port, base_port + 1, base_port + 2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


def chat(base_url: str, *, stream: bool) -> tuple[str, str]:
    """The response's text and the worker that sent it, with the openai client."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from one to twenty in words."}],
            max_tokens=24,
            temperature=0,
            stream=stream,
        )
        response = raw.parse()
        if not stream:
            text = response.choices[0].message.content
        else:
            text = "".join(
                chunk.choices[0].delta.content or "" for chunk in response if chunk.choices
            )
        return text, raw.headers["x-sglang-omni-worker"]


@pytest.mark.replica
@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None,
    reason="xllamacpp is not installed: pip install 'omni-proxy[replica]'",
)
@pytest.mark.skipif(
    not MODEL_FILE.exists(), reason=f"{MODEL_FILE} is missing: omni-proxy replica fetch {MODEL}"
)
async def test_two_real_replicas_share_four_parallel_chats_and_streams(tmp_path, base_port):
    command = (
        f'["{sys.executable}", "-m", "omni_proxy", "replica", "--model", "{MODEL}",'
        ' "--engine", "llamacpp", "--threads", "1", "--context", "512",'
        ' "--host", "{host}", "--port", "{port}"]'
    )
    file = tmp_path / "proxy.toml"
    file.write_text(launch(command, base_port))
    async with program("--config", file) as running:
        with trio.fail_after(60):
            await until_ready(running)
        url = str(running.client.base_url).rstrip("/")
        results: list[tuple[str, str]] = []

        async def ask(stream: bool) -> None:
            results.append(await trio.to_thread.run_sync(lambda: chat(url, stream=stream)))

        async with trio.open_nursery() as nursery:
            for stream in (False, True, False, True):
                nursery.start_soon(ask, stream)
        assert all(text.strip() for text, _ in results)
        assert len({worker for _, worker in results}) == 2
        models = await running.get_json("/v1/models")
        assert [model["id"] for model in models["data"]] == [MODEL]
