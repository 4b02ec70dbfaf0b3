"""The connection as the steps of an exchange use it: I/O with timeouts, and the upstream.

Contract: the steps of an exchange take `(io, exchange)`. An upstream connection that they leave
open is closed by `downstream.connection` at the end, whatever the result.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal, Protocol

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.loop.stream import HUNG_UP, PEER_CLOSED, IoTask, Stream
from omni_proxy.dataplane.loop.task import Readable
from omni_proxy.dataplane.services import ExchangeServices
from omni_proxy.dataplane.upstream.pool import ResponseStart
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.response import UpstreamResponse


class StreamedBody(Protocol):
    """A request body that is forwarded while it arrives: `relay.request_body`."""

    is_complete: bool
    was_streamed: bool

    def start_stream(self, lines: bytes) -> bytes: ...

    async def stream_to(self, upstream: Stream) -> bool: ...


class KeepAlive(Protocol):
    """SSE keep-alive of the response, if configured: `relay.sse_keepalive`."""

    begun: bool

    async def for_head(self, upstream: Readable) -> None: ...

    async def for_first_chunk(self, upstream: Stream, response: UpstreamResponse) -> None: ...

    def continues_with(self, start: ResponseStart) -> bool: ...

    async def replace_with_error(self, start: ResponseStart) -> bool: ...

    def reject(self, error: HttpError) -> None: ...


class ResponseReader(Protocol):
    """Reads the relayed response of one exchange: `relay.stored_responses`. `framing`: a
    `BodyFraming` of `relay.response_relay`, or None."""

    exchange: Exchange

    def begin(self, chunk: bytes, framing: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class ListenerRole:
    """Which requests the connections of a listener may send. `admin_only`: all go to the admin API.
    `metrics_only`: likewise, and it serves only metrics. `relays`: model requests go to workers;
    otherwise the admin API refuses them."""

    admin_only: bool = False
    metrics_only: bool = False
    relays: bool = True


PUBLIC: Final = ListenerRole()


# How an attempt gets its connection. "redialled": an idle one; if that breaks without a byte, a new
# one, once. "idle": an idle one, but if that breaks the attempt fails, because the request must not
# reach the worker twice. "new": no idle one.
Connections = Literal["redialled", "idle", "new"]


class AttemptIO(IoTask):
    """The task of an attempt at a worker: its connection, its timeouts and the services."""

    __slots__ = ("body_stream", "connections", "keepalive", "services", "settings", "upstream")

    def __init__(self, services: ExchangeServices) -> None:
        super().__init__(services.loop)
        self.connections: Connections = "redialled"
        self.services = services
        self.settings = services.settings
        self.upstream: Stream | None = None  # closed at the end unless it was released to its pool
        self.body_stream: StreamedBody | None = None
        self.keepalive: KeepAlive | None = None

    @property
    def response_head_secs(self) -> float:
        """The timeout for the head of a worker's response, in seconds."""
        return self.settings.timeouts.response_head

    def close_upstream(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.close()


class ExchangeIO(AttemptIO):
    """One client connection with its current exchange."""

    __slots__ = (
        "close_after_response", "exchange", "head_bytes", "peer", "role", "unread", "watch",
    )  # fmt: skip

    def __init__(
        self,
        services: ExchangeServices,
        sock: socket.socket,
        peer: str,
        role: ListenerRole,
    ) -> None:
        super().__init__(services)
        self.role = role
        self.peer = peer
        self.client = Stream(services.loop, sock, self)
        self.exchange: Exchange | None = None
        self.watch: ResponseReader | None = None  # set if the response of its exchange is read
        self.close_after_response = False
        self.unread = b""  # bytes read from the client, not yet consumed
        self.head_bytes = 0  # size of the current request's head

    def is_disconnect(self, mask: int) -> bool:
        return bool(mask & (PEER_CLOSED if self.settings.half_close_aborts else HUNG_UP))

    def take_received_body(self, exchange: Exchange, length: int, limit: int) -> bytes | None:
        """The body if all of it arrived with its head; None if more must be read. Raises HttpError
        413."""
        if length > limit:
            raise HttpError(413, "payload too large", "payload_too_large", close=True)
        if not 0 <= length <= len(self.unread):
            return None
        body, self.unread = self.unread[:length], self.unread[length:]
        exchange.bytes_in = length
        exchange.body_at = self.loop.now
        return body

    def await_next_request(self) -> None:
        """Set the timeouts of an idle connection."""
        self.phase, self.deadline = "idle", inf
        self.phase_deadline = self.loop.now + self.settings.timeouts.client_idle
