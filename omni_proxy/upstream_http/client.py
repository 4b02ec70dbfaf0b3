"""The client for the proxy's own calls to workers: to one, or to many in parallel.

Probes, admin operations and model lists use it; requests of clients go through the data plane. Some
operations have different paths in different engines (`flush_cache`, `generate_token`): only the
engine's confirmation is a success, never another route's 200 (note:routers 1.6, note:real-engines
5). Invariant: only literal addresses are dialled, no proxy environment variable is read, no
redirect is followed, and no connection outlives its call. A failed call affects only its own
result: `call_worker` and `broadcast` never raise because of a worker, and change no health state
and no counter. Reads are limited to `READ_BYTES`, so that other tasks run between chunks: h11
parses everything that one read returned, and httpx reads 64 KiB by default.
"""

from __future__ import annotations

import json
import math
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar

import httpcore
import httpx
import trio

from omni_proxy import __version__
from omni_proxy.admin_ops.engine_dialects import FLUSH_CACHE, RESET_PREFIX_CACHE
from omni_proxy.config.url import dial_address
from omni_proxy.fleet.worker import Worker
from omni_proxy.system.tls_contexts import client_context
from omni_proxy.upstream_http.credentials import headers_with_own_key
from omni_proxy.wire.bounded_json import read_json
from omni_proxy.wire.forwarded import HOP_FIELD

READ_BYTES: Final = 4096


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        return await self._stream.read(min(max_bytes, READ_BYTES), timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend(httpcore.AsyncNetworkBackend):
    def __init__(self) -> None:
        self._backend = httpcore.TrioBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(
            await self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        )

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._backend.connect_unix_socket(path, timeout, socket_options))

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


class BufferedTransport(httpx.AsyncHTTPTransport):
    """httpx's transport without proxies, over a pool with small reads. `uds`: path of a Unix
    socket, None for TCP."""

    def __init__(self, context: ssl.SSLContext, limits: httpx.Limits, uds: str | None) -> None:
        super().__init__(verify=context, trust_env=False, limits=limits, uds=uds)
        # httpx has no parameter for the network backend, so its unused pool is replaced.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            uds=uds,
            network_backend=_Backend(),
        )


# Statuses of a worker that lacks the route, or its method.
JSON_TYPE: Final = {"content-type": "application/json"}
ROUTE_ABSENT: Final = (404, 405, 501)
MAX_PARALLEL_CALLS: Final = 64  # of one broadcast; further calls wait for a free slot

# Connections are not reused: a worker may close one at the moment of its reuse, which would count
# as a failed probe; a new connection also shows whether the worker still accepts connections.
_LIMITS: Final = httpx.Limits(max_connections=4, max_keepalive_connections=0)
# ValueError: a configured endpoint or key that can't be encoded in a request.
_CALL_ERRORS: Final = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)

# Hop header of the admin request in progress; the calls to workers made for it forward it.
incoming_hops: ContextVar[str] = ContextVar("incoming_hops", default="")


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a worker. `timeout_secs` bounds the whole call to one worker, `max_bytes` the
    response body."""

    method: str
    target: str  # ASCII: a path, perhaps with a query
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_secs: float = 5.0
    max_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CallResult:
    """The response of one worker. Without a response `status` is None and `error` the reason."""

    worker: Worker
    status: int | None
    body: bytes
    error: str
    secs: float
    content_type: str = ""
    detail: str = ""  # the message of the exception whose type is in `error`

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300 and not self.error

    @property
    def failure(self) -> str:
        """A short reason why the call did not succeed."""
        return self.error or f"status={self.status}"

    def json(self) -> object:
        """The parsed body; None if it is not JSON, or has more values than `read_json` reads."""
        try:
            return read_json(self.body)
        except ValueError:
            return None


async def call_worker(worker: Worker, call: Call) -> CallResult:
    """Make one call and read the whole response. Never raises because of the worker."""
    await trio.lowlevel.checkpoint()  # some failures have none, and callers retry in loops
    started_at = trio.current_time()
    status, body, error, content_type = None, b"", "ReadTimeout", ""
    detail = ""
    with trio.move_on_after(call.timeout_secs):
        try:
            status, read, content_type = await _send(worker, call)
            error = "" if read is not None else f"answer of more than {call.max_bytes} bytes"
            body = read or b""
        except _CALL_ERRORS as failure:
            error, detail = type(failure).__name__, str(failure)
    secs = round(trio.current_time() - started_at, 6)
    return CallResult(worker, status, body, error, secs, content_type, detail)


async def broadcast(
    workers: Iterable[Worker],
    call: Call,
    *,
    max_parallel: float = MAX_PARALLEL_CALLS,
    on_result: Callable[[CallResult], None] = lambda _: None,
) -> list[CallResult]:
    """Make the same call to all workers. The results are in the order of the workers.

    `on_result` is called with each result when it arrives. `max_parallel` must be `math.inf` for
    calls whose responses wait for each other: a bound could deadlock.
    """

    async def call_one(worker: Worker) -> CallResult:
        result = await call_worker(worker, call)
        on_result(result)
        return result

    return await call_each(list(workers), call_one, max_parallel=max_parallel)


class WorkerClient:
    """An httpx client for many requests to one worker, renewed when its TLS context changes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._client: httpx.AsyncClient | None = None
        self._tls_context: ssl.SSLContext | None = None

    async def client(self) -> httpx.AsyncClient:
        """Raises OSError if the CA file can't be read."""
        tls_context = tls_context_for(self._worker)
        if self._client is None or tls_context is not self._tls_context:
            await self.close()
            self._client, self._tls_context = open_client(self._worker), tls_context
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def open_client(worker: Worker) -> httpx.AsyncClient:
    """A client for one worker, which the caller must close. It keeps the TLS context of now: open a
    new one when `tls_context_for` returns another. Raises OSError as `tls_context_for` does.
    """
    path = dial_address(worker.url)
    uds = path if isinstance(path, str) else None
    transport = BufferedTransport(tls_context_for(worker) or _plain_context(), _LIMITS, uds)
    return httpx.AsyncClient(
        transport=transport,
        timeout=None,
        follow_redirects=False,
        trust_env=False,
        # Identity: a small compressed response must not decompress into a large one.
        headers={"user-agent": f"omni-proxy/{__version__}", "accept-encoding": "identity"},
    )


def tls_context_for(worker: Worker) -> ssl.SSLContext | None:
    """The worker's TLS context, shared with the data plane; None without TLS. Raises OSError if the
    CA file can't be read."""
    if not worker.url.startswith("https://"):
        return None
    return client_context(worker.tls_ca, verify=worker.tls_verify)


@cache
def _plain_context() -> ssl.SSLContext:
    """A context shared by all clients of plain HTTP. It is unused, but httpx would create one for
    each client."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def build_request(
    client: httpx.AsyncClient, worker: Worker, address: tuple[str, int] | str, call: Call
) -> httpx.Request:
    """A request to `address`, a literal address of the worker, with the host name in the worker's
    URL as Host and SNI."""
    base = httpx.URL("http://localhost" if worker.url.startswith("unix:") else worker.url)
    host = {"host": base.netloc.decode("ascii")}
    headers = host | dict(headers_with_own_key(worker, call.headers))
    headers |= _hop_headers(worker, call.headers)
    extensions = {"sni_hostname": base.host} if base.scheme == "https" else {}
    if not isinstance(address, str):
        base = base.copy_with(host=address[0])
    url = base.copy_with(raw_path=call.target.encode("ascii"))
    content = call.body if call.body or call.method in ("POST", "PUT", "PATCH") else None
    return client.build_request(
        call.method, url, headers=headers, content=content, extensions=extensions
    )


def _hop_headers(worker: Worker, headers: Mapping[str, str]) -> dict[str, str]:
    """The hop header: ids of the previous proxies, then this proxy's; only for a worker that is a
    proxy (`wire.forwarded`)."""
    previous = headers.get(HOP_FIELD) or incoming_hops.get()
    proxy_id = worker.hop_line.decode("ascii").partition(": ")[2].strip()
    marks = ", ".join(hop for hop in (previous, proxy_id) if hop)
    return {HOP_FIELD: marks} if proxy_id else {}


async def read_bounded(response: httpx.Response, max_bytes: int) -> bytes | None:
    """The body as sent, or None if it is longer than `max_bytes`.

    A longer body is read to its end and dropped: abandoning httpx's nested generators would leave
    them to the garbage collector. The caller's deadline ends an endless body.
    """
    body = bytearray()
    length = 0
    async for chunk in response.aiter_raw():
        length += len(chunk)
        if length <= max_bytes:
            body += chunk
    return bytes(body) if length <= max_bytes else None


async def _send(worker: Worker, call: Call) -> tuple[int, bytes | None, str]:
    """Status, body (None if it is too long) and content type."""
    async with open_client(worker) as client:
        request = build_request(client, worker, worker.address, call)
        response = await client.send(request, stream=True)
        try:
            body = await read_bounded(response, call.max_bytes)
        finally:
            await response.aclose()
    return response.status_code, body, response.headers.get("content-type", "")


FLUSH_PATHS: Final = (FLUSH_CACHE, RESET_PREFIX_CACHE)  # SGLang's, vLLM's
_TOKEN: Final = {"max_tokens": 1, "temperature": 0}


async def flush_cache(
    worker: Worker, headers: Mapping[str, str], timeout_secs: float
) -> CallResult:
    """The result of the first flush route that the worker has."""
    calls = [Call("POST", path, headers=headers, timeout_secs=timeout_secs) for path in FLUSH_PATHS]
    return await _first_of(worker, calls)


async def generate_token(
    worker: Worker, headers: Mapping[str, str], timeout_secs: float
) -> CallResult:
    """Call the worker's generating health check if it has one, else generate one token."""
    sent = {**headers, **JSON_TYPE}
    completion = {"prompt": "hi", **_TOKEN, **({"model": worker.model} if worker.model else {})}
    sampling = {"text": "hi", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    calls = [
        Call("GET", "/health_generate", headers=headers, timeout_secs=timeout_secs),
        Call("POST", "/v1/completions", _body(completion), sent, timeout_secs),
        Call("POST", "/generate", _body(sampling), sent, timeout_secs),
    ]
    return await _first_of(worker, calls)


async def _first_of(worker: Worker, calls: list[Call]) -> CallResult:
    """The response of the first route that the worker has, else of the last route."""
    for call in calls[:-1]:
        result = await call_worker(worker, call)
        if result.status not in ROUTE_ABSENT:
            return result
    return await call_worker(worker, calls[-1])


def _body(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields).encode()


Item = TypeVar("Item")
Result = TypeVar("Result")


async def call_each(
    items: Sequence[Item],
    call: Callable[[Item], Awaitable[Result]],
    *,
    max_parallel: float = math.inf,
) -> list[Result]:
    """Call for all items concurrently, at most `max_parallel` at a time. There is one result for
    each item, in their order; a call that may fail returns its failure as a result, because an
    exception cancels the others."""
    results: dict[int, Result] = {}
    limiter = trio.CapacityLimiter(max_parallel)

    async def call_one(number: int) -> None:
        async with limiter:
            results[number] = await call(items[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(items)):
            nursery.start_soon(call_one, number)
    return [results[number] for number in range(len(items))]
