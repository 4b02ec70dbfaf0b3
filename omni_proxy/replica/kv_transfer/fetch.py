"""The decode side: gets the KV of a prompt from a prefill replica.

Invariant: every fetch ends within its deadlines, whatever the peer sends. It connects only to
allowed addresses and returns a complete KV with this model's sizes. At most `max_bytes` of KVs are
in memory at a time, being fetched or waiting for their request.
"""

from __future__ import annotations

import socket

import trio
from torch import Tensor

from omni_proxy.replica.kv_transfer.frame_stream import FrameStream
from omni_proxy.replica.kv_transfer.thread_messages import FetchOrder
from omni_proxy.replica.kv_transfer.transfer_settings import (
    TransferSettings,
    is_allowed,
    parse_peers,
)
from omni_proxy.replica.kv_transfer.wire import (
    FrameKind,
    Hello,
    Offer,
    TransferFailed,
    WireError,
    frame,
    message,
    parse,
)
from omni_proxy.replica.models.kv import byte_view, layer_buffer, layer_bytes, put_layer

CONNECT_SECS = 5.0
SILENCE = 1.25  # longer than prefill's own wait, so that prefill reports why there is no KV


class ByteBudget:
    """A budget of bytes: `take` waits for free bytes, `give_back` never waits. Not thread-safe."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0
        self._changed = trio.Event()

    @property
    def taken(self) -> int:
        return self._taken

    async def take(self, count: int) -> None:
        """Wait until that many bytes are free. Raises TransferFailed if the budget is smaller."""
        if count > self._total:
            raise TransferFailed(
                f"the KV has {count} bytes, more than the limit of {self._total}: raise "
                "--kv-max-bytes"
            )
        while self._taken + count > self._total:
            await self._changed.wait()
        self._taken += count

    def give_back(self, count: int) -> None:
        self._taken -= count
        changed, self._changed = self._changed, trio.Event()
        changed.set()


class Fetcher:
    """Runs fetches in the transfer thread."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._networks = parse_peers(settings.peers)

    async def fetch(self, order: FetchOrder) -> tuple[Tensor, int]:
        """Fill the order's KV; return the logits and prefill's count of cached tokens.

        Raises TransferFailed.
        """
        where = f"{order.fetch.host}:{order.fetch.port}"
        try:
            with FrameStream(await self._connect(order)) as stream:
                return await self._converse(order, stream)
        except WireError as error:
            raise TransferFailed(f"{where}: {error}") from None
        except TransferFailed as error:
            raise TransferFailed(f"prefill at {where}: {error}") from None

    async def _converse(self, order: FetchOrder, stream: FrameStream) -> tuple[Tensor, int]:
        fetch = order.fetch
        hello = Hello(fetch.key, fetch.engine_id, order.prompt, order.tokens, order.identity)
        offer = await self._await_offer(stream, message(FrameKind.HELLO, hello))
        self._check(offer, order)
        secs = self._settings.transfer_secs
        with trio.move_on_after(secs) as clock:
            logits = await self._read(stream, order)
            await stream.write(frame(FrameKind.DONE))
        if clock.cancelled_caught:
            raise TransferFailed(f"the KV did not arrive within {secs:g} s")
        order.kv.length = order.tokens
        return logits, offer.cached_tokens

    async def _await_offer(self, stream: FrameStream, hello: bytes) -> Offer:
        """Wait for the offer; each WAIT message from prefill restarts the deadline."""
        secs = SILENCE * self._settings.wait_secs
        kind, body, unsent = FrameKind.WAIT, b"", hello
        while kind is FrameKind.WAIT:
            await trio.lowlevel.checkpoint()
            with trio.move_on_after(secs) as clock:
                await stream.write(unsent)
                unsent = b""
                kind, body = await stream.read_message(FrameKind.WAIT, FrameKind.OFFER)
            if clock.cancelled_caught:
                raise TransferFailed(f"it sent nothing for {secs:g} s")
        return parse(body, Offer)

    def _check(self, offer: Offer, order: FetchOrder) -> None:
        """Raises TransferFailed if the offer is not the requested KV."""
        dtype_bytes = order.kv.layer(0).element_size()
        expected = (
            order.kv.shape.layers,
            layer_bytes(order.kv, order.tokens),
            order.vocabulary * dtype_bytes,
        )
        offered = (offer.layers, offer.layer_bytes, offer.logits_bytes)
        if offered != expected or not 0 <= offer.cached_tokens < order.tokens:
            raise TransferFailed(f"it offers a KV with other sizes: {offered}, expected {expected}")

    async def _read(self, stream: FrameStream, order: FetchOrder) -> Tensor:
        order.kv.reserve(order.tokens)
        rows = layer_buffer(order.kv, order.tokens)
        for layer in range(order.kv.shape.layers):
            await self._read_data(stream, rows)
            put_layer(order.kv, layer, rows)
        logits = rows.new_empty(order.vocabulary)
        await self._read_data(stream, logits)
        return logits

    async def _read_data(self, stream: FrameStream, into: Tensor) -> None:
        view = byte_view(into)
        kind, length = await stream.read_header()
        if kind is not FrameKind.DATA or length != len(view):
            raise WireError(f"got a {kind.name} frame of {length} bytes, expected {len(view)}")
        await stream.read_into(view)

    async def _connect(self, order: FetchOrder) -> trio.socket.SocketType:
        """Raises TransferFailed."""
        host, port = order.fetch.host, order.fetch.port
        failure = "the connection failed"
        with trio.move_on_after(min(CONNECT_SECS, self._settings.wait_secs)):
            try:
                addresses = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise TransferFailed(f"its name cannot be resolved: {error.strerror}") from None
            for family, kind, protocol, _, address in addresses:
                if not is_allowed(str(address[0]), self._networks):
                    failure = f"fetching KVs from {address[0]} is not allowed: add it to --kv-peers"
                    continue
                sock = trio.socket.socket(family, kind, protocol)
                try:
                    await sock.connect(address)
                except OSError as error:
                    failure = error.strerror or str(error)
                    sock.close()
                except BaseException:
                    sock.close()
                    raise
                else:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return sock
        raise TransferFailed(failure)
