"""Client of the cluster store: its address and password, and a connection to it.

Valkey or Redis over trio: RESP3, batches of commands, published messages. hiredis encodes and
parses; this module has the stream. Invariant: replies arrive in the order of their commands;
replies to a cancelled caller are dropped, and a batch that was sent in part makes the connection
unusable. Nothing here retries: an error ends the connection. The password is read again for each
connection, by blocking calls, and is in no error message and in no shown URL. Source: the
specification of RESP3 (redis.io/docs/reference/protocol-spec), `HELLO` and `SUBSCRIBE`.
"""

from __future__ import annotations

import os
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import hiredis
import trio

from omni_proxy.config.schema import Config
from omni_proxy.config.tables.cluster import StoreAddress, hide_password, store_address
from omni_proxy.system.tls_contexts import PemError, client_context, tls_error_text


class CredentialError(Exception):
    """The store's URL or password can't be read."""


def read_address(config: Config) -> StoreAddress:
    """The store's address with its password. Blocks. Raises CredentialError."""
    table = config.cluster
    url = table.url
    if table.url_env:
        url = os.environ.get(table.url_env, "")
        if not url:
            raise CredentialError(f"the variable {table.url_env} (cluster.url_env) is not set")
    try:
        address = store_address(url)
    except ValueError as error:
        source = f"the variable {table.url_env}" if table.url_env else "cluster.url"
        raise CredentialError(f"{source} {error.args[0]}") from None
    if not table.password_file:
        return address
    try:
        password = Path(table.password_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        name = table.password_file
        raise CredentialError(f"cluster.password_file {name} can't be read: {reason}") from None
    return address._replace(password=password)


def tls_context(address: StoreAddress, config: Config) -> ssl.SSLContext | None:
    """None for a connection without TLS. Raises CredentialError."""
    if not address.tls:
        return None
    try:
        return client_context(config.server.tls_worker_ca, verify=True)
    except PemError as error:
        raise CredentialError(str(error)) from None
    except OSError as error:
        raise CredentialError(tls_error_text(error)) from None


def shown_url(config: Config) -> str:
    """The store's URL without its password, for the status and the log."""
    table = config.cluster
    return hide_password(table.url) or f"(from {table.url_env})"


RECEIVE_BYTES: Final = 1 << 16

Command: TypeAlias = tuple[str | bytes | int, ...]
OnMessage = Callable[[bytes, bytes], None]  # channel, payload


class StoreError(Exception):
    """The store can't be used: it is unreachable, refuses, or its reply is an error."""


class StoreRefused(StoreError):
    """The store's reply is an error. `code` is its first word, such as WRONGPASS."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class _Batch:
    """Commands that were sent together, and the replies so far."""

    __slots__ = ("arrived", "expected", "replies")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.replies: list[Any] = []
        self.arrived = trio.Event()


class RedisConnection:
    """A connection. `local_host`: its local address, "" if unknown.

    `reply_timeout_secs`: timeout of the replies to one `call`, long enough for a slow network.
    """

    def __init__(
        self, stream: trio.abc.Stream, on_message: OnMessage, reply_timeout_secs: float
    ) -> None:
        self._stream = stream
        self._reply_timeout_secs = reply_timeout_secs
        self._on_message = on_message
        self._reader = hiredis.Reader(protocolError=StoreError, replyError=StoreRefused)
        self._batches: deque[_Batch] = deque()  # in the order of sending
        self._sending = trio.Lock()
        self._partial_write = False  # a batch was sent in part
        self.local_host = ""

    async def call(self, *commands: Command) -> list[Any]:
        """Send commands; return their replies in order. Raises StoreError.

        If a reply is an error, the other commands of the batch were executed.
        """
        with trio.move_on_after(self._reply_timeout_secs) as scope:
            batch = await self.send(*commands)
            await batch.arrived.wait()
        if scope.cancelled_caught:
            raise StoreError(f"no reply for {self._reply_timeout_secs:g} s")
        for reply in batch.replies:
            if isinstance(reply, StoreRefused):
                raise reply
        return batch.replies

    async def send(self, *commands: Command) -> _Batch:
        """Send commands without waiting for the replies. Raises StoreError."""
        packed = b"".join(bytes(hiredis.pack_command(command)) for command in commands)  # type: ignore[arg-type]
        async with self._sending:
            if self._partial_write:
                raise StoreError("the connection broke")
            batch = _Batch(len(commands))
            self._batches.append(batch)
            self._partial_write = True
            try:
                await self._stream.send_all(packed)
            except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
                raise StoreError(f"the connection broke: {_cause(error)}") from None
            self._partial_write = False
        return batch

    async def receive(self) -> None:
        """Read replies and published messages, until StoreError is raised."""
        while True:
            try:
                piece = await self._stream.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
                raise StoreError(f"the connection broke: {_cause(error)}") from None
            if not piece:
                raise StoreError("the store has closed the connection")
            self._reader.feed(bytes(piece))
            while (reply := self._reader.gets()) is not False:
                self._take(reply)

    def _take(self, reply: object) -> None:
        if isinstance(reply, hiredis.PushNotification):
            match list(reply):
                case [b"message", bytes(channel), bytes(payload)]:
                    self._on_message(channel, payload)
                    return
                case [b"subscribe", *_]:
                    reply = None  # in RESP3 this push is the reply to SUBSCRIBE
                case _:
                    return
        if not self._batches:
            raise StoreError("it sent an unexpected reply")
        batch = self._batches[0]
        batch.replies.append(reply)
        if len(batch.replies) == batch.expected:
            self._batches.popleft()
            batch.arrived.set()


@asynccontextmanager
async def connected(
    address: StoreAddress,
    on_message: OnMessage,
    tls: ssl.SSLContext | None,
    reply_timeout_secs: float,
) -> AsyncIterator[RedisConnection]:
    """Connect, authenticate and select the database. Raises StoreError."""
    try:
        socket_stream = await trio.open_tcp_stream(address.host, address.port)
        local_host = str(socket_stream.socket.getsockname()[0])
    except OSError as error:
        raise StoreError(f"can't be reached: {_cause(error)}") from None
    stream: trio.abc.Stream = socket_stream
    if tls is not None:
        stream = trio.SSLStream(stream, tls, server_hostname=address.host)
    connection = RedisConnection(stream, on_message, reply_timeout_secs)
    connection.local_host = local_host
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.receive)
            await connection.call(*_greeting(address))
            yield connection
            nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(0) as scope:
            scope.shield = True
            await trio.aclose_forcefully(stream)


def _greeting(address: StoreAddress) -> Sequence[Command]:
    hello: Command = ("HELLO", 3)
    if address.password:
        hello = (*hello, "AUTH", address.user or "default", address.password)
    return [hello, *([("SELECT", address.database)] if address.database else [])]


def _cause(error: BaseException) -> str:
    """The text of the innermost cause."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = error.__cause__ or error
    if isinstance(cause, BaseExceptionGroup):
        return _cause(cause)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
