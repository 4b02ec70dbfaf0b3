"""TLS between Envoy and the picker: server and client certificates, and their renewal."""

import shutil
import socket
import ssl

import trio

from tests.promises.support.envoy_program import (
    PATIENCE_SECS,
    Ports,
    envoy,
    idle,
    needs_envoy,
    picked,
    picker_config,
    ports_with_same_picker,
)
from tests.promises.support.fleet_program import chat, put
from tests.promises.support.tls_helpers import AUTHORITY, FILES

pytestmark = needs_envoy


def envoy_with(certificate: str | None):
    """Changes of Envoy's configuration: trust the authority, and present this certificate."""
    client_certificate = ""
    if certificate:
        client_certificate = f"""
          tls_certificates:
          - certificate_chain: {{ filename: {FILES / certificate}.pem }}
            private_key: {{ filename: {FILES / certificate}-key.pem }}"""
    return (
        (
            "  - name: picker\n",
            f"""  - name: picker
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context:
          validation_context:
            trusted_ca: {{ filename: {AUTHORITY} }}{client_certificate}
""",
        ),
    )


def tls_keys(cert, key, more=""):
    return f'grpc_tls_cert = "{cert}"\ngrpc_tls_key = "{key}"\n{more}'


async def certificate_at(port: int) -> bytes:
    """The certificate that the listener presents to a TLS client."""

    def fetch() -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_SECS).encode()

    return await trio.to_thread.run_sync(fetch)


async def test_envoy_connects_by_tls_and_a_renewed_certificate_is_used(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(FILES / "server.pem", cert)
    shutil.copy(FILES / "server-key.pem", key)
    tables = tls_keys(cert, key)
    async with picked(tmp_path, changes=envoy_with(None), tables=tables) as here:
        assert (await here.client.post("/v1/chat/completions", json=chat())).status_code == 200
        before = await certificate_at(here.at.grpc)
        cert.write_text("no certificate")
        assert await certificate_at(here.at.grpc) == before
        await here.picker.until_logged("certificate_reload_failed file=\\S+cert.pem")
        shutil.copy(FILES / "renewed-key.pem", key)
        shutil.copy(FILES / "renewed.pem", cert)
        assert await certificate_at(here.at.grpc) != before
        await here.picker.until_logged("certificate_reloaded")
        assert (await here.client.post("/v1/chat/completions", json=chat())).status_code == 200
        with socket.create_server(("127.0.0.1", 0)) as taken:
            other = Ports(envoy=0, grpc=taken.getsockname()[1], http=here.at.http)
            put(here.file, picker_config(other, here.fleet, tables=tables))
            await here.picker.client.post("/reload")
            await here.picker.until_logged("grpc_listen_failed .*Address already in use")
        assert (await here.client.post("/v1/chat/completions", json=chat())).status_code == 200
        # TLS is turned off at the same address: new connections are plain, so Envoy's fail.
        put(here.file, picker_config(here.at, here.fleet))
        await here.picker.client.post("/reload")
        await here.picker.until("/status", lambda body: body["picker"]["streams"] == 0)
        with trio.fail_after(PATIENCE_SECS):
            while (await here.client.post("/v1/chat/completions", json=chat())).status_code == 200:
                await trio.sleep(0.02)
        await idle(here.picker)


async def test_envoy_needs_a_client_certificate_where_the_picker_requires_one(tmp_path):
    more = f'grpc_tls_client_ca = "{AUTHORITY}"\n'
    tables = tls_keys(FILES / "server.pem", FILES / "server-key.pem", more)
    async with (
        picked(tmp_path, changes=envoy_with("client"), tables=tables) as here,
        envoy(
            tmp_path, ports_with_same_picker(here.at), here.fleet, envoy_with("stranger")
        ) as stranger,
        envoy(
            tmp_path, ports_with_same_picker(here.at), here.fleet, envoy_with(None)
        ) as without_certificate,
    ):
        assert (await here.client.post("/v1/chat/completions", json=chat())).status_code == 200
        for client in (stranger, without_certificate):
            assert (await client.post("/v1/chat/completions", json=chat())).status_code == 500
