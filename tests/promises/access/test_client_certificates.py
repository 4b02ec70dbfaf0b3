"""Commands and the trainer present certificates to a proxy that requires them of clients."""

import os
import subprocess
from pathlib import Path

import pytest
import trio

from omni_proxy.cli.client.tls_options import ClientCert
from tests.ports import free_port
from tests.program_forkserver import forking_interpreter
from tests.promises.support.fleet_program import put, starting, toml, workers
from tests.promises.support.tls_helpers import AUTHORITY, FILES
from tools.training.endpoint import Endpoint

pytestmark = pytest.mark.usefixtures("soon")
ROOT = Path(__file__).parents[3]
KEY = "open sesame"
TLS = (
    f"tls_cert = '{FILES}/server.pem'\ntls_key = '{FILES}/server-key.pem'\n"
    f"tls_client_ca = '{AUTHORITY}'\n"
)
OWN = ("--client-cert", f"{FILES}/client.pem", "--client-key", f"{FILES}/client-key.pem")
UNKNOWN_AUTHORITY = (
    "--client-cert",
    f"{FILES}/stranger.pem",
    "--client-key",
    f"{FILES}/stranger-key.pem",
)
CA = ("--ca", AUTHORITY)


@pytest.fixture
async def proxy(tmp_path):
    """The configuration file, the proxy's URL and the worker's URL."""
    file = tmp_path / "proxy.toml"
    async with workers("w") as (worker,):
        put(file, toml([worker], port=free_port(), more=f"{TLS}[admin]\napi_key = '{KEY}'\n"))
        async with starting("--config", file) as running:
            url = (await running.until_logged(r"listener_opened url=(https://[^\s\"]+)"))[1]
            await running.until_logged("from=unknown to=healthy")
            yield file, url, worker.url


async def run(*arguments):
    """The exit status and the output of one command."""
    done = await trio.run_process(
        [forking_interpreter(), "-m", "omni_proxy", *map(str, arguments)],
        capture_stdout=True, stderr=subprocess.STDOUT, check=False, cwd=ROOT,
        env={**os.environ, "SGLANG_OMNI_ADMIN_KEY": KEY},
    )  # fmt: skip
    output = done.stdout.decode()
    assert "Traceback" not in output
    return done.returncode, output


async def test_commands_present_the_certificate_of_their_options(proxy):
    file, url, worker = proxy
    for options in (("--config", file), ("--url", url, *CA)):
        status, output = await run("status", *options, *OWN)
        assert (status, f"at {url}: ready" in output) == (0, True), output
    status, output = await run("workers", "disable", worker, "--url", url, *CA, *OWN)
    assert status == 0
    assert output.startswith(f"disabled {worker}: disabled, healthy, by omni-proxy-cli/")
    status, output = await run("top", "--once", "--url", url.removeprefix("https://"), *CA, *OWN)
    assert (status, "1 disabled" in output) == (0, True), output


async def test_without_a_certificate_commands_name_the_missing_option(proxy):
    file, url, _ = proxy
    status, output = await run("workers", "--config", file)
    assert (status, "a client certificate is required" in output) == (2, True), output
    status, output = await run("workers", "--url", url, *CA)
    assert (status, "pass --client-cert" in output) == (2, True), output


async def test_certificates_of_unknown_authorities_are_reported(proxy):
    _, url, _ = proxy
    status, output = await run("status", "--url", url, *CA, *UNKNOWN_AUTHORITY)
    assert (status, "does not accept the certificate" in output) == (2, True), output
    assert "unknown ca" in output
    status, output = await run("status", "--url", url, *OWN)
    assert (status, "no known authority signed the certificate of" in output) == (2, True), output


async def test_the_trainers_endpoint_presents_its_certificate(proxy):
    _, url, _ = proxy

    def call(certificate):
        endpoint = Endpoint(url, 20.0, certificate=certificate, key=KEY)
        try:
            return endpoint.call("/weights"), endpoint.ask("hi")[0]
        finally:
            endpoint.close()

    certificate = ClientCert(str(AUTHORITY), OWN[1], OWN[3])
    answer, _ = await trio.to_thread.run_sync(call, certificate)
    assert (answer.status, answer.body["waiting"]) == (200, [])
    answer, error = await trio.to_thread.run_sync(call, ClientCert(ca=str(AUTHORITY)))
    assert (answer.ok, answer.status) == (False, 0)
    assert "requires a client certificate" in answer.why
    assert "requires a client certificate" in error
