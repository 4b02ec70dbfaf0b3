"""The gRPC server for Envoy, which runs on an asyncio loop in a separate thread, and its listener.

Contract: that thread uses no trio objects. It sends picks and counts to trio's thread by
`TrioToken.run_sync_soon`, in the order of the messages, and gets results by the asyncio loop's
`call_soon_threadsafe`. Each stream's request is ended exactly once, however the stream ends. `run`
returns when no thread and no stream is left. Without `shared` no two programs listen at one
address, and only sockets are ever replaced or removed, no other file. TLS files are checked when a
connection begins.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  grpc's server runs on asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

import grpc
import trio
from google.protobuf.message import DecodeError

from omni_proxy.config.problem import ConfigError
from omni_proxy.config.schema import ServerConfig
from omni_proxy.picker.ext_proc.messages import Destination
from omni_proxy.picker.ext_proc.picks import EnvoyPicks, ResponseFacts, Ticket
from omni_proxy.picker.ext_proc.protocol import ProcessingRequest, ProcessingResponse
from omni_proxy.picker.ext_proc.stream import EnvoyStream, ProxiedRequest
from omni_proxy.system.certificate_reload import CertificateFiles
from omni_proxy.system.tls_contexts import server_context
from omni_proxy.wire.errors import HttpError


class AsyncioThread:
    """An asyncio loop in a thread, in which all gRPC servers of a process run.

    gRPC has one event queue for all loops, and loses events if one of its loops is closed while
    others run. Call `run` first, then `call`; call `stop` after the last `call` has ended.
    """

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._loop = asyncio.new_event_loop()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until `stop`. Cancelling does not end it, because running calls have to end first."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, self._main)
                task_status.started()

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def call(self, task: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the loop until it ends, also if cancelled. Raises what it raises."""
        ended = trio.Event()
        future = asyncio.run_coroutine_threadsafe(task, self._loop)
        future.add_done_callback(lambda _: self._token.run_sync_soon(ended.set))
        with trio.CancelScope(shield=True):
            await ended.wait()
        future.result()


_log = logging.getLogger(__name__)
# gRPC warns about each stream that a stopping server refuses, although Envoy retries these.
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.ERROR)

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
MESSAGE_OVERHEAD_BYTES: Final = 1024 * 1024  # for headers, in addition to the largest body
MIN_MESSAGE_BYTES: Final = 128 * 1024 * 1024  # lower limit for gRPC, so that we can answer 413
MAX_BYTES: Final = 2**31 - 1  # largest message of gRPC


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum bytes of a request body, and of all buffered bodies together."""

    body: int
    held: int


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """`address`: `host:port` or `unix:PATH`. `shared`: another server may still listen there."""

    address: str
    tls: GrpcTls | None = None
    shared: bool = False


class GrpcServer:
    """A gRPC server: `run` listens, `stop` ends it."""

    def __init__(self, listen: ListenSettings, limits: Limits, picks: EnvoyPicks) -> None:
        self._listen = GrpcAddress(listen.address, shared=listen.shared)
        self._tls = listen.tls
        self._limits = limits
        self._picks = picks
        self._token = trio.lowlevel.current_trio_token()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._cut: asyncio.Event | None = None
        self._grace = 0.0
        self._held_bytes = 0
        self._refusal: OSError | None = None  # why it could not listen
        self.address = ""  # the bound address, once it listens
        self.streams = 0

    async def run(self, thread: AsyncioThread, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until cancelled, or until `stop` and the end of the streams.

        Raises OSError if it can't listen.
        """
        listening, ended = trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._in_thread, thread, listening, ended)
            try:
                await listening.wait()
                if self._refusal is None:
                    task_status.started()
                await ended.wait()
            finally:
                self.stop(0.0)
        if self._refusal is not None:
            raise self._refusal

    async def _in_thread(
        self, thread: AsyncioThread, listening: trio.Event, ended: trio.Event
    ) -> None:
        def listens() -> None:
            self._token.run_sync_soon(listening.set)

        # It ends only by `stop`, so that cancelling leaves no thread behind.
        try:
            await thread.call(self._serve(listens))
        except OSError as error:
            self._refusal = error
            listening.set()
        ended.set()

    def stop(self, grace_secs: float) -> None:
        """Accept no new streams, and cut the running ones after `grace_secs`."""
        loop, event = self._loop, self._stop if grace_secs else self._cut
        self._grace = grace_secs
        if loop is not None and event is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(event.set)

    async def _serve(self, listens: Callable[[], None]) -> None:
        stop, cut = asyncio.Event(), asyncio.Event()
        max_bytes = max(MIN_MESSAGE_BYTES, self._limits.body + MESSAGE_OVERHEAD_BYTES)
        server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", min(MAX_BYTES, max_bytes))]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
        )
        self.address = self._listen.bind(partial(self._add_port, server))
        await server.start()
        _log.info("listener_opened url=%s purpose=external_processor", self.address)
        self._loop, self._stop, self._cut = asyncio.get_running_loop(), stop, cut
        listens()
        ends = [asyncio.create_task(event.wait()) for event in (stop, cut)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not cut.is_set():
            drained = asyncio.create_task(server.stop(self._grace))
            await asyncio.wait((drained, ends[1]), return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await server.stop(None)
        self._listen.unlink()

    def _add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Raises OSError for unusable certificates, RuntimeError if gRPC can't bind."""
        if self._tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self._tls.credentials()))

    async def _process(
        self, messages: AsyncIterator[ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Serve one stream, which has one request."""
        stream, ticket, facts = EnvoyStream(self._limits.body), Ticket(), ResponseFacts()
        self.streams += 1
        held_bytes = 0
        try:
            async for message in messages:
                try:
                    responses = stream.receive(message)
                except HttpError as error:
                    responses = stream.refused(error)
                held_bytes = self._note_held(held_bytes, stream.held_bytes)
                if self._held_bytes > self._limits.held and held_bytes:
                    responses = stream.refused(_too_many_bytes())
                if stream.pending is not None:
                    result = await self._pick(ticket, stream.pending)
                    responses = _responses(stream, result)
                self._note_progress(stream, ticket, facts)
                if stream.complete:
                    self._end_ticket(ticket, facts)
                for response in responses:
                    await context.write(response)
                if stream.over:
                    break
            facts.complete = facts.complete or stream.ends_unseen
        except (ValueError, DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            return  # the stream is cut; if this were raised, gRPC would log a traceback
        finally:
            self._note_held(held_bytes, 0)
            self.streams -= 1
            self._end_ticket(ticket, facts)

    def _note_progress(self, stream: EnvoyStream, ticket: Ticket, facts: ResponseFacts) -> None:
        if stream.has_pair and stream.status and not facts.status:
            self._token.run_sync_soon(self._picks.begin_response, ticket)
        _note_times(stream, facts)

    async def _pick(self, ticket: Ticket, pending: ProxiedRequest) -> Destination | HttpError:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Destination | HttpError] = loop.create_future()

        def settle(result: Destination | HttpError) -> None:
            if not future.done():
                future.set_result(result)

        def reply(result: Destination | HttpError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(settle, result)

        self._token.run_sync_soon(self._picks.begin, ticket, pending, reply)
        return await future

    def _end_ticket(self, ticket: Ticket, facts: ResponseFacts) -> None:
        if not ticket.handed_back:
            ticket.handed_back = True
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._picks.end, ticket, facts)

    def _note_held(self, before: int, now: int) -> int:
        self._held_bytes += now - before
        return now


def _responses(stream: EnvoyStream, result: Destination | HttpError) -> list[ProcessingResponse]:
    return stream.refused(result) if isinstance(result, HttpError) else stream.picked(result)


def _note_times(stream: EnvoyStream, facts: ResponseFacts) -> None:
    if stream.status and not facts.head_at:
        facts.head_at = monotonic()
        facts.status = stream.status
    if stream.chunks and not facts.first_at:
        facts.first_at = monotonic()
    facts.chunks, facts.bytes_out = stream.chunks, stream.bytes_out
    facts.complete, facts.last_chunk = stream.complete, stream.last_chunk


def _too_many_bytes() -> HttpError:
    return HttpError(
        503, "router overloaded: too many bytes of request bodies are buffered", 503,
        type="overloaded_error", reason="max_held_bytes",
    ).with_headers(("retry-after", "1"))  # fmt: skip


class GrpcAddress:
    """`listen`: `host:port` or `unix:PATH`. `shared`: another program may still listen there.

    gRPC binds with SO_REUSEPORT, so that a new program can listen before the old one stops. For the
    same reason a Unix socket is bound at a temporary path and then renamed.
    """

    def __init__(self, listen: str, *, shared: bool) -> None:
        self._listen = listen
        self._shared = shared
        self._path = Path(listen[5:]) if listen.startswith("unix:") else None
        self._inode = 0

    def bind(self, add_port: Callable[[str], int]) -> str:
        """Bind; return the bound address. `add_port`: method of a gRPC server. Raises OSError."""
        try:
            if self._path is not None:
                self._bind_path(self._path, add_port)
                return self._listen
            host, _, port = self._listen.rpartition(":")
            if port != "0" and not self._shared:
                _refuse_if_taken(host.strip("[]"), int(port))
            return f"{host}:{add_port(self._listen)}"
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or "gRPC refuses the address"
            number = getattr(error, "errno", None) or errno.EADDRNOTAVAIL
            raise OSError(number, f"cannot listen for Envoy: {reason}", self._listen) from None

    def unlink(self) -> None:
        """Remove the file of a Unix socket, unless another program has replaced it."""
        path = self._path
        if path is not None and path.exists() and path.stat().st_ino == self._inode:
            path.unlink()

    def _bind_path(self, path: Path, add_port: Callable[[str], int]) -> None:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise OSError(errno.EEXIST, "there is a file at this path that is not a socket")
            if not self._shared and _is_served(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        add_port(f"unix:{aside}")
        self._inode = aside.stat().st_ino
        aside.replace(path)


def _refuse_if_taken(host: str, port: int) -> None:
    """Raises OSError if another socket listens there: without SO_REUSEPORT the bind fails."""
    resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, _, _, address in resolved:
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(str(path)) == 0


class GrpcTls:
    """`server`: has the files as `tls_cert`, `tls_key`, `tls_client_ca`; the last may be empty."""

    def __init__(self, server: ServerConfig) -> None:
        self._files = CertificateFiles(server, _certificate_configuration)

    def credentials(self) -> grpc.ServerCredentials:
        """Raises OSError if the files can't be used."""
        try:
            first = self._files.load()
        except ConfigError as error:
            raise OSError(None, str(error)) from None
        # gRPC calls `reload` in its own thread when a connection begins. If it raised, gRPC would
        # refuse the connection.
        return grpc.dynamic_ssl_server_credentials(
            first,
            self._files.reload,
            require_client_authentication=bool(self._files.server.tls_client_ca),
        )


def _certificate_configuration(server: ServerConfig) -> grpc.ServerCertificateConfiguration:
    """Raises ConfigError, OSError."""
    server_context(server, "picker.grpc_")  # validates them, since gRPC reports no details
    key, cert = Path(server.tls_key).read_bytes(), Path(server.tls_cert).read_bytes()
    authorities = Path(server.tls_client_ca).read_bytes() if server.tls_client_ca else None
    return grpc.ssl_server_certificate_configuration([(key, cert)], authorities)
