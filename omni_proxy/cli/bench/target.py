"""The server that is measured: its URL, the caller's key, its certificate, its model.

Invariant: this module sends only GET /v1/models, and the key only to this server.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import httpx

from omni_proxy.cli.client.tls_options import ClientCert, create_tls_context, explain_tls_error
from omni_proxy.cli.screen.text_table import strip_noise

CONNECT_SECS = 10.0


class TargetError(Exception):
    """The server can't be measured; the text gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """`base` ends before `/v1`."""

    base: str
    key: str  # "" for none
    client_cert: ClientCert

    def create_client(self) -> httpx.AsyncClient:
        """A client without connection limits; it times out only while connecting. Raises
        ClientCertError."""
        return httpx.AsyncClient(
            verify=create_tls_context(self.client_cert),
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(None, connect=CONNECT_SECS),
            trust_env=False,  # HTTP_PROXY must not apply here
        )


def target_of(url: str, key_env: str | None, client_cert: ClientCert) -> BenchTarget:
    """Raises TargetError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise TargetError(f"{url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise TargetError(f"{url}: expected http://HOST:PORT or https://HOST:PORT")
    if not 0 < (parsed.port or 1) < 65536:
        raise TargetError(f"{url}: expected a port from 1 to 65535")
    if parsed.query or parsed.fragment or parsed.userinfo:
        raise TargetError(f"{url}: expected no user, query or fragment; a key: --api-key-env NAME")
    key = "" if key_env is None else os.environ.get(key_env, "").strip()
    if key_env is not None and not (key and key.isascii() and key.isprintable()):
        raise TargetError(f"--api-key-env {key_env}: this environment variable holds no key")
    base = str(parsed).rstrip("/").removesuffix("/v1")
    return BenchTarget(base, key, client_cert)


async def find_model(client: httpx.AsyncClient, target: BenchTarget, wanted: str | None) -> str:
    """`wanted`, else the first that the server lists. Raises TargetError."""
    url = f"{target.base}/v1/models"
    try:
        response = await client.get(url, timeout=CONNECT_SECS)
    except httpx.HTTPError as error:
        reason = strip_noise(str(error)) or type(error).__name__
        text = explain_tls_error(target.base, reason, target.client_cert)
        raise TargetError(text or f"{target.base} can't be reached: {reason}") from None
    if wanted is not None:
        return wanted
    if response.status_code in (401, 403):
        raise TargetError(f"{url}: status {response.status_code}; give a key: --api-key-env NAME")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise TargetError(
            f"{url}: status {response.status_code} and no list of models; give --model NAME"
        ) from None
