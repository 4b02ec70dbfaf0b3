"""The whole program with TLS to clients and workers: start, reload, probes and commands."""

import shutil
import subprocess
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
import trio

from tests.ports import free_port
from tests.program_forkserver import forking_interpreter
from tests.promises.support.fakes import answering, counted
from tests.promises.support.fleet_program import (
    PATIENCE_SECS,
    PROBES,
    chat,
    put,
    starting,
    toml,
    workers,
)
from tests.promises.support.tls_helpers import (
    AUTHORITY,
    FILES,
    SecureWorker,
    client_context,
    secure_workers,
)

pytestmark = pytest.mark.usefixtures("soon")
CERT, KEY = FILES / "server.pem", FILES / "server-key.pem"
TLS = f"tls_cert = '{CERT}'\ntls_key = '{KEY}'\n"
FLAGS = ("--tls-cert-path", CERT, "--tls-key-path", KEY)


@asynccontextmanager
async def secure_program(*arguments):
    """Starts the program with a client that uses HTTPS."""
    async with starting(*arguments) as running:
        url = (await running.until_logged(r"listener_opened url=(https://[^\s\"]+)"))[1]
        await running.client.aclose()
        running.client = httpx.AsyncClient(
            base_url=url, verify=client_context(), timeout=PATIENCE_SECS, trust_env=False
        )
        await running.until("/live", lambda body: body.get("status") == "alive")
        yield running


async def command(*arguments):
    """Runs `omni-proxy` with these arguments; returns its exit status and output."""
    process = await trio.run_process(
        [forking_interpreter(), "-m", "omni_proxy", *map(str, arguments)],
        capture_stdout=True, stderr=subprocess.STDOUT, check=False, cwd=FILES.parents[2],
    )  # fmt: skip
    assert b"Traceback" not in process.stdout
    return process.returncode, process.stdout.decode()


async def test_flags_of_other_routers_enable_tls_and_their_clients_work(tmp_path):
    file = tmp_path / "proxy.toml"
    completion = (
        b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}]}'
    )
    content_type = "content-type: application/json"
    worker = SecureWorker(answering(counted(completion, content_type)))
    async with secure_workers(worker):
        entry = f"[[workers]]\nurl = '{worker.url}'\n"
        file.write_text(f"[server]\nport = 0\ntls_worker_ca = '{AUTHORITY}'\n{PROBES}{entry}")
        async with secure_program("--config", file, *FLAGS) as running:
            await running.until_routable(worker)
            base = str(running.client.base_url)

            def ask():
                with (
                    httpx.Client(verify=client_context(), trust_env=False) as http,
                    openai.OpenAI(base_url=f"{base}/v1", api_key="k", http_client=http) as client,
                ):
                    return client.chat.completions.create(model="m", messages=chat()["messages"])

            completion_of_client = await trio.to_thread.run_sync(ask)
            assert completion_of_client.choices[0].message.content == "hello"
            assert (await running.get_json("/status"))["listeners"] == [base.partition("://")[2]]


async def test_a_worker_with_an_untrusted_certificate_gets_no_requests(tmp_path):
    file = tmp_path / "proxy.toml"
    worker = SecureWorker(answering(counted(b"{}")), "stranger")
    async with secure_workers(worker):
        entry = f"[[workers]]\nurl = '{worker.url}'\n"
        file.write_text(f"[server]\nport = 0\n{TLS}{PROBES}{entry}")
        async with secure_program("--config", file) as running:
            body = await running.until("/workers", lambda body: body["workers"][0]["last_error"])
            assert "certificate verify failed" in body["workers"][0]["last_error"]
            assert not body["workers"][0]["routable"]
            put(file, f"[server]\nport = 0\n{TLS}{PROBES}{entry}tls_verify = false\n")
            await running.until_routable(worker)


async def test_commands_find_a_program_with_tls_by_its_configuration_file(tmp_path):
    file = tmp_path / "proxy.toml"
    socket_path = tmp_path / "admin.sock"
    async with workers("w") as fleet:
        config = toml(fleet, port=free_port(), more=TLS)
        file.write_text(config)
        async with secure_program("--config", file) as running:
            await running.until_routable(*fleet)
            status, body = await command("workers", "list", "--config", file)
            assert (status, fleet[0].url in body) == (0, True), body
            put(file, f"{config}[admin]\nlisten = 'unix:{socket_path}'\n")
            await running.until_logged("purpose=admin")
            status, body = await command("workers", "disable", fleet[0].url, "--config", file)
            assert status == 0, body
            status, body = await command("status", "--url", str(running.client.base_url))
            assert status == 2, body
            assert "certificate" in body


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("server", "renewed-key", "server.tls_key: "),
        ("nowhere", "server-key", "cannot be read"),
        ("server", "locked-key", "is encrypted"),
    ],
)
async def test_an_unusable_key_or_certificate_is_reported_by_check_and_at_the_start(
    tmp_path, cert, key, message
):
    file = tmp_path / "proxy.toml"
    names = f"tls_cert = '{FILES / cert}.pem'\ntls_key = '{FILES / key}.pem'\n"
    file.write_text(f"[server]\nport = 0\n{names}[[workers]]\nurl = 'http://127.0.0.1:1'\n")
    for arguments in (("check", file), ("--config", file)):
        status, body = await command(*arguments)
        assert status == 2
        assert message in body
        assert "server.tls_" in body
        assert "listening" not in body


async def test_a_reload_rejects_an_invalid_key_and_keeps_the_current_one(tmp_path):
    file, key_file = tmp_path / "proxy.toml", tmp_path / "mine-key.pem"
    shutil.copyfile(KEY, key_file)
    async with workers("w") as fleet:
        good = toml(fleet, more=f"tls_cert = '{CERT}'\ntls_key = '{key_file}'\n")
        file.write_text(good)
        async with secure_program("--config", file) as running:
            await running.until_routable(*fleet)
            put(file, good.replace(str(key_file), str(FILES / "renewed-key.pem")))
            await running.until_logged(
                r"config_refused source=[a-z]+ action=kept_current\n.*server\.tls_key: .*not the key"
            )
            assert (await running.client.post("/reload")).status_code == 422
            assert (await running.ask()).status_code == 200
            put(file, good)
            key_file.write_text("nonsense")  # a failed renewal of the certificate
            await running.until_logged("certificate_reload_failed")
            assert (await running.ask()).status_code == 200
            tls = (await running.get_json("/status"))["data_plane"]["tls"]
            assert "mine-key.pem" in tls["error"]
