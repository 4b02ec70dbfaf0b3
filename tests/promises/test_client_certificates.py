"""Before a proxy that lets in only clients with a certificate, commands and trainer show theirs."""

import os
import subprocess
from pathlib import Path

import pytest
import trio

from omni_proxy.cli.client.tls_options import ClientCert
from tests.ports import free_port
from tests.program_forkserver import forking_interpreter
from tests.promises.fleet_program import put, starting, toml, workers
from tests.promises.tls_helpers import AUTHORITY, FILES
from tools.training.endpoint import Endpoint

pytestmark = pytest.mark.usefixtures("soon")
ROOT = Path(__file__).parents[2]
KEY = "open sesame"
TLS = (
    f"tls_cert = '{FILES}/server.pem'\ntls_key = '{FILES}/server-key.pem'\n"
    f"tls_client_ca = '{AUTHORITY}'\n"
)
OWN = ("--client-cert", f"{FILES}/client.pem", "--client-key", f"{FILES}/client-key.pem")
STRANGERS = ("--client-cert", f"{FILES}/stranger.pem", "--client-key", f"{FILES}/stranger-key.pem")
CA = ("--ca", AUTHORITY)


@pytest.fixture
async def place(tmp_path):
    """(its file, its URL, the worker's)"""
    file = tmp_path / "proxy.toml"
    async with workers("w") as (worker,):
        put(file, toml([worker], port=free_port(), more=f"{TLS}[admin]\napi_key = '{KEY}'\n"))
        async with starting("--config", file) as running:
            url = (await running.says(r"listening on (https://[^\s\"]+)"))[1]
            await running.says("from=unknown to=healthy")
            yield file, url, worker.url


async def asked(*words):
    """(exit status, all that it said)"""
    ended = await trio.run_process(
        [forking_interpreter(), "-m", "omni_proxy", *map(str, words)],
        capture_stdout=True, stderr=subprocess.STDOUT, check=False, cwd=ROOT,
        env={**os.environ, "SGLANG_OMNI_ADMIN_KEY": KEY},
    )  # fmt: skip
    body = ended.stdout.decode()
    assert "Traceback" not in body
    return ended.returncode, body


async def test_commands_show_the_certificate_that_is_named(place):
    file, url, worker = place
    for words in (("--config", file), ("--url", url, *CA)):
        status, body = await asked("status", *words, *OWN)
        assert (status, f"at {url}: ready" in body) == (0, True), body
    status, body = await asked("workers", "disable", worker, "--url", url, *CA, *OWN)
    assert status == 0
    assert body.startswith(f"disabled {worker}: disabled, healthy, by omni-proxy-cli/")
    status, body = await asked("top", "--once", "--url", url.removeprefix("https://"), *CA, *OWN)
    assert (status, "1 disabled" in body) == (0, True), body


async def test_without_a_certificate_commands_name_what_is_missing(place):
    file, url, _ = place
    status, body = await asked("workers", "--config", file)
    assert (status, "a client certificate is required" in body) == (2, True), body
    status, body = await asked("workers", "--url", url, *CA)
    assert (status, "pass --client-cert" in body) == (2, True), body


async def test_one_that_is_not_believed_is_reported_and_so_is_a_proxy_that_is_not(place):
    _, url, _ = place
    status, body = await asked("status", "--url", url, *CA, *STRANGERS)
    assert (status, "does not accept the certificate" in body) == (2, True), body
    assert "unknown ca" in body
    status, body = await asked("status", "--url", url, *OWN)
    assert (status, "no known authority signed the certificate of" in body) == (2, True), body


async def test_the_trainers_endpoint_shows_its_own(place):
    _, url, _ = place

    def call(certificate):
        endpoint = Endpoint(url, 20.0, certificate=certificate, key=KEY)
        try:
            return endpoint.call("/weights"), endpoint.ask("hi")[0]
        finally:
            endpoint.close()

    certificate = ClientCert(str(AUTHORITY), OWN[1], OWN[3])
    answer, _ = await trio.to_thread.run_sync(call, certificate)
    assert (answer.status, answer.body["waiting"]) == (200, [])
    answer, body = await trio.to_thread.run_sync(call, ClientCert(ca=str(AUTHORITY)))
    assert (answer.ok, answer.status) == (False, 0)
    assert "requires a client certificate" in answer.why
    assert "requires a client certificate" in body
