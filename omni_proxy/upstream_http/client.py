"""Control calls to one worker: probes, model lists. Model traffic goes through the door instead.

Invariant: only literal addresses are dialled, no proxy variable is read, no redirect is followed,
and no connection outlives its call. Deadlines belong to the caller.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import httpx

from omni_proxy import __version__
from omni_proxy.config.url import dial_address
from omni_proxy.fleet.worker import Worker
from omni_proxy.system.tls_contexts import client_context
from omni_proxy.upstream_http.buffered_reads import BufferedTransport
from omni_proxy.wire.hops import HOP_FIELD

# Statuses of a worker that does not have the route, or not this method of it.
ROUTE_ABSENT: Final = (404, 405, 501)

# A kept connection can be closed by the worker in the moment we reuse it, which would count as a
# failed probe; a fresh one also tells whether the worker still accepts.
_LIMITS = httpx.Limits(max_connections=4, max_keepalive_connections=0)

# The marks on the request that is being answered: what is asked of workers for it carries them on.
came_by: ContextVar[str] = ContextVar("came_by", default="")


def trusted(worker: Worker) -> ssl.SSLContext | None:
    """What it is believed by, the same as for model traffic; None without TLS. Raises OSError."""
    if not worker.url.startswith("https://"):
        return None
    return client_context(worker.tls_ca, verify=worker.tls_verify)


def open_client(worker: Worker) -> httpx.AsyncClient:
    """The caller closes it, and opens another once `trusted` gives another context. Raises
    OSError where that does."""
    path = dial_address(worker.url)
    uds = path if isinstance(path, str) else None
    transport = BufferedTransport(trusted(worker) or _unused(), _LIMITS, uds)
    return httpx.AsyncClient(
        transport=transport,
        timeout=None,
        follow_redirects=False,
        trust_env=False,
        # Identity: a small compressed reply must not unfold into a large one here.
        headers={"user-agent": f"omni-proxy/{__version__}", "accept-encoding": "identity"},
    )


@cache
def _unused() -> ssl.SSLContext:
    """For plain HTTP, which verifies nothing: httpx would make one for each client, in 1 ms."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class WorkerClient:
    """The client of one worker over many calls; another one as soon as it trusts others."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._client: httpx.AsyncClient | None = None
        self._trusted: ssl.SSLContext | None = None

    async def client(self) -> httpx.AsyncClient:
        """Raises OSError where what it trusts can't be read."""
        now = trusted(self._worker)
        if self._client is None or now is not self._trusted:
            await self.close()
            self._client, self._trusted = open_client(self._worker), now
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


@dataclass(frozen=True, slots=True)
class Call:
    """What a worker is asked. `timeout_secs` bounds one worker's answer, `max_bytes` its body."""

    method: str
    target: str  # ASCII: a path, perhaps with a query
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_secs: float = 5.0
    max_bytes: int = 4 * 1024 * 1024


def build(
    client: httpx.AsyncClient, worker: Worker, address: tuple[str, int] | str, call: Call
) -> httpx.Request:
    """The call at a literal address of the worker's, under the worker's own name."""
    base = httpx.URL("http://localhost" if worker.url.startswith("unix:") else worker.url)
    own = {"host": base.netloc.decode("ascii"), **call.headers, **_credentials(worker)}
    own |= _hops(worker, call.headers)
    extensions = {"sni_hostname": base.host} if base.scheme == "https" else {}
    if not isinstance(address, str):
        base = base.copy_with(host=address[0])
    url = base.copy_with(raw_path=call.target.encode("ascii"))
    content = call.body if call.body or call.method in ("POST", "PUT", "PATCH") else None
    return client.build_request(
        call.method, url, headers=own, content=content, extensions=extensions
    )


def _hops(worker: Worker, headers: Mapping[str, str]) -> dict[str, str]:
    """The marks of the proxies before us and ours, where the worker is a proxy (`wire.hops`)."""
    before = headers.get(HOP_FIELD) or came_by.get()
    own = worker.hop_line.decode("ascii").partition(": ")[2].strip()
    marks = ", ".join(mark for mark in (before, own) if mark)
    return {HOP_FIELD: marks} if own else {}


def _credentials(worker: Worker) -> dict[str, str]:
    key = os.environ.get(worker.api_key_env, "") if worker.api_key_env else ""
    return {"authorization": f"Bearer {key}"} if key else {}


async def read_bounded(response: httpx.Response, max_bytes: int) -> bytes | None:
    """The body as sent, or None when it is longer than that.

    A longer one is read to its end and not kept: httpx's nested generators can't be left half-way
    without leaking them to the garbage collector. The caller's deadline ends an endless one.
    """
    body = bytearray()
    length = 0
    async for piece in response.aiter_raw():
        length += len(piece)
        if length <= max_bytes:
            body += piece
    return bytes(body) if length <= max_bytes else None
