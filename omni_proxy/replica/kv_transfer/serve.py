"""The prefill side: a port where decode replicas fetch KVs and routers query this replica.

    HELLO kept:ID         a KV that a response named: sent if it is in the table, else refused
    HELLO room:N          waits for the prefill request of that room, which is computed only then
    HELLO transfer:ID     waits for the prefill request of that id, computed before or after
    GET /query, /health   HTTP, for Mooncake's routers
Invariant: every wait has a deadline; a key has one connection at a time. If one of two connected
legs is lost, the other leg is notified immediately. KVs are only read, never changed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from omni_proxy.replica.kv_transfer.export_table import ClaimError, Export, ExportTable
from omni_proxy.replica.kv_transfer.frame_stream import FrameStream
from omni_proxy.replica.kv_transfer.request_fields import kept_key
from omni_proxy.replica.kv_transfer.thread_messages import Leg, LegDone, LegFailed, LegMatched, Post
from omni_proxy.replica.kv_transfer.transfer_settings import TransferSettings
from omni_proxy.replica.kv_transfer.wire import (
    FrameKind,
    Hello,
    Offer,
    Refuse,
    TransferFailed,
    WireError,
    difference,
    frame,
    message,
    parse,
)
from omni_proxy.replica.models.kv import byte_view, layer_bytes, layer_of

log = logging.getLogger(__name__)

HELLO_SECS: Final = 10.0
REFUSE_SECS: Final = 2.0
MAX_CONNECTIONS: Final = 1024
MAX_HEAD_BYTES: Final = 8192
HTTP_START: Final = b"GET "


@dataclass(slots=True, eq=False)
class _Rendezvous:
    """The prefill request of one key, decode's connection for it, or both."""

    leg: Leg | None = None
    connected: bool = False
    export: Export | None = None
    failure: str = ""
    changed: trio.Event = field(default_factory=trio.Event)

    def notify(self) -> None:
        changed, self.changed = self.changed, trio.Event()
        changed.set()


class TransferServer:
    """Serves a prefill replica's KVs. All methods run in the transfer thread."""

    def __init__(
        self, settings: TransferSettings, table: ExportTable, engine_id: str, post: Post
    ) -> None:
        self._settings = settings
        self._table = table
        self._engine_id = engine_id
        self._post = post
        self._rendezvous: dict[str, _Rendezvous] = {}
        self._lease_added = trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(
        self,
        listener: socket.socket,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve connections until cancelled."""
        sock = trio.socket.from_stdlib_socket(listener)
        slots = trio.Semaphore(MAX_CONNECTIONS)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._expire_kept)
            task_status.started()
            while True:
                await slots.acquire()
                try:
                    connection, _ = await sock.accept()
                except OSError as error:  # out of descriptors, or the client has disconnected
                    slots.release()
                    log.warning("kv_accept_failed error=%s", error)
                    await trio.sleep(0.1)
                    continue
                nursery.start_soon(self._handle, connection, slots)

    # Orders of the stage

    def announce(self, leg: Leg) -> None:
        """A prefill request has arrived; if it `waits`, it fails unless decode connects in time."""
        rendezvous = self._rendezvous.setdefault(leg.key, _Rendezvous())
        rendezvous.leg = leg
        rendezvous.notify()
        if leg.waits and not rendezvous.connected and self._nursery is not None:
            self._nursery.start_soon(self._await_decode, rendezvous, leg)

    def hand_over(self, leg: Leg, export: Export) -> None:
        """The KV of an announced leg is computed."""
        rendezvous = self._rendezvous.get(leg.key)
        if rendezvous is not None and rendezvous.leg is leg:
            rendezvous.export = export
            rendezvous.notify()

    def kept(self, key: str) -> None:
        """A KV was added to the export table."""
        self._lease_added.set()
        rendezvous = self._rendezvous.get(key)
        if rendezvous is not None:
            rendezvous.notify()
            if not rendezvous.connected:
                self._drop(key, rendezvous)

    def withdraw(self, leg: Leg, reason: str) -> None:
        """The prefill request has ended without a KV; its decode leg is refused."""
        rendezvous = self._rendezvous.get(leg.key)
        if rendezvous is not None and rendezvous.leg is leg:
            rendezvous.leg, rendezvous.export, rendezvous.failure = None, None, reason
            rendezvous.notify()
            self._drop(leg.key, rendezvous)

    async def _await_decode(self, rendezvous: _Rendezvous, leg: Leg) -> None:
        secs = self._settings.wait_secs
        with trio.move_on_after(secs):
            while not rendezvous.connected and rendezvous.leg is leg:
                await rendezvous.changed.wait()
            return
        if rendezvous.leg is leg and not rendezvous.connected:
            self._drop(leg.key, rendezvous)
            reason = f"no decode replica connected for {leg.key} within {secs:g} s"
            self._post(LegFailed(leg, reason))

    def _drop(self, key: str, rendezvous: _Rendezvous) -> None:
        if self._rendezvous.get(key) is rendezvous:
            del self._rendezvous[key]

    async def _expire_kept(self) -> None:
        while True:
            self._lease_added = trio.Event()
            secs = self._table.expire()
            with trio.move_on_after(float("inf") if secs is None else max(secs, 0.01)):
                await self._lease_added.wait()

    # Connections

    async def _handle(self, connection: trio.socket.SocketType, slots: trio.Semaphore) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with FrameStream(connection) as stream:
                await self._receive_request(stream)
        except (TransferFailed, WireError, OSError) as error:
            log.debug("kv_connection_ended reason=%s", error)
        except Exception:  # one connection must not end the others
            log.exception("kv_connection_failed")
        finally:
            slots.release()

    async def _receive_request(self, stream: FrameStream) -> None:
        hello = None
        with trio.move_on_after(HELLO_SECS):
            start = await stream.read(len(HTTP_START))
            if start == HTTP_START:
                await self._respond_http(stream)
                return
            hello = await self._read_hello(stream, start)
        if hello is None:
            return
        try:
            await self._serve(stream, hello)
        except TransferFailed as error:
            log.info("kv_transfer_refused key=%s reason=%s", hello.key, error)
            with trio.move_on_after(REFUSE_SECS):
                await stream.write(message(FrameKind.REFUSE, Refuse(str(error))))

    async def _read_hello(self, stream: FrameStream, start: bytes) -> Hello:
        kind, length = await stream.read_header(start)
        if kind is not FrameKind.HELLO:
            raise WireError(f"a {kind.name} frame where a HELLO was due")
        return parse(await stream.read(length), Hello)

    async def _serve(self, stream: FrameStream, hello: Hello) -> None:
        """Raises TransferFailed."""
        if hello.engine_id not in ("", self._engine_id):
            raise TransferFailed(
                f"the KV belongs to engine {hello.engine_id}, this is {self._engine_id}: the "
                "replica was restarted since then"
            )
        if hello.key.startswith(kept_key("")):
            await self._send_kept(stream, hello, self._claim(hello.key))
            return
        rendezvous = self._rendezvous.setdefault(hello.key, _Rendezvous())
        if rendezvous.connected:
            raise TransferFailed(f"{hello.key} is in use by another decode request")
        rendezvous.connected = True
        rendezvous.notify()
        try:
            await self._offer(stream, hello, rendezvous)
        finally:
            self._drop(hello.key, rendezvous)

    def _claim(self, key: str) -> Export:
        try:
            return self._table.claim(key)
        except ClaimError as error:
            raise TransferFailed(f"no KV {key}: {error}") from None

    async def _send_kept(self, stream: FrameStream, hello: Hello, export: Export) -> None:
        reason = "its transfer failed"
        try:
            await self._send(stream, hello, export)
            reason = "it has been fetched already"
        finally:
            self._table.release(hello.key, reason)

    async def _offer(self, stream: FrameStream, hello: Hello, rendezvous: _Rendezvous) -> None:
        """Wait for the prefill request and its KV, then send it; report failures to both legs."""
        leg: Leg | None = None
        reason = "the transfer was cancelled"
        try:
            leg = await self._await_leg(stream, hello, rendezvous)
            if leg is not None and leg.waits:
                export = await self._await_export(stream, rendezvous)
                await self._send(stream, hello, export)
            else:
                await self._send_kept(
                    stream, hello, await self._await_kept(stream, hello, rendezvous)
                )
            reason = ""
        except (TransferFailed, WireError) as error:
            reason = str(error)
            raise
        finally:
            if leg is not None and leg.waits and rendezvous.leg is leg:
                ended = LegFailed(leg, reason) if reason else LegDone(leg)
                self._post(ended)

    async def _await_leg(
        self, stream: FrameStream, hello: Hello, rendezvous: _Rendezvous
    ) -> Leg | None:
        """Wait for the prefill request; None if it ended and its KV is in the table.

        Raises TransferFailed.
        """
        key, secs = hello.key, self._settings.wait_secs
        with trio.move_on_after(secs):
            await self._wait_for(
                stream,
                rendezvous,
                lambda: bool(rendezvous.leg or key in self._table or self._table.gone(key)),
            )
        leg = rendezvous.leg
        if leg is None and key not in self._table:
            gone = self._table.gone(key) or f"no prefill request for it within {secs:g} s"
            raise TransferFailed(f"no KV {key}: {gone}")
        if leg is not None and leg.prompt != hello.prompt:
            if leg.waits:
                self._post(LegFailed(leg, "the decode request of its room has another prompt"))
                rendezvous.leg = None
            raise TransferFailed(f"{key} belongs to another prompt at the prefill replica")
        if leg is not None and leg.waits:
            self._post(LegMatched(leg))
        return leg

    async def _await_export(self, stream: FrameStream, rendezvous: _Rendezvous) -> Export:
        """Raises TransferFailed."""
        await self._wait_for(
            stream, rendezvous, lambda: rendezvous.export is not None, send_wait=True
        )
        assert rendezvous.export is not None
        return rendezvous.export

    async def _await_kept(
        self, stream: FrameStream, hello: Hello, rendezvous: _Rendezvous
    ) -> Export:
        """Raises TransferFailed."""
        await self._wait_for(stream, rendezvous, lambda: hello.key in self._table, send_wait=True)
        return self._claim(hello.key)

    async def _wait_for(
        self,
        stream: FrameStream,
        rendezvous: _Rendezvous,
        holds: Callable[[], bool],
        *,
        send_wait: bool = False,
    ) -> None:
        """Wait until `holds()`; with `send_wait`, send WAIT to the decode replica at intervals.

        Raises TransferFailed if the prefill request ends or the decode replica disconnects.
        """
        ended: list[str] = []

        async def watch() -> None:
            ended.append(await stream.wait_closed())
            rendezvous.notify()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            while not holds() and not rendezvous.failure and not ended:
                with trio.move_on_after(self._settings.wait_secs / 4) as clock:
                    await rendezvous.changed.wait()
                if clock.cancelled_caught and send_wait:
                    await self._send_waits(stream, ended)
            nursery.cancel_scope.cancel()
        if rendezvous.failure or ended:
            raise TransferFailed(rendezvous.failure or ended[0])

    async def _send_waits(self, stream: FrameStream, ended: list[str]) -> None:
        try:
            await stream.write(frame(FrameKind.WAIT))
        except TransferFailed as error:
            ended.append(str(error))

    async def _send(self, stream: FrameStream, hello: Hello, export: Export) -> None:
        """Send the KV and wait until the decode replica has it. Raises TransferFailed."""
        if (hello.prompt, hello.tokens) != (export.prompt, export.tokens):
            raise TransferFailed("the KV is that of another prompt")
        if reason := difference(hello.identity, export.identity):
            raise TransferFailed(reason)
        secs = self._settings.transfer_secs
        with trio.move_on_after(secs) as clock:
            await self._write(stream, export)
            await stream.read_message(FrameKind.DONE)
        if clock.cancelled_caught:
            raise TransferFailed(f"the decode replica did not receive the KV within {secs:g} s")

    async def _write(self, stream: FrameStream, export: Export) -> None:
        kv, tokens, logits = export.kv, export.tokens, byte_view(export.logits)
        size = layer_bytes(kv, tokens)
        offer = Offer(kv.shape.layers, size, len(logits), export.cached_tokens)
        await stream.write(message(FrameKind.OFFER, offer))
        for layer in range(kv.shape.layers):
            await stream.write_data(byte_view(layer_of(kv, layer, tokens)))
        await stream.write_data(logits)

    # HTTP

    async def _respond_http(self, stream: FrameStream) -> None:
        """GET /query returns the engine by data-parallel rank; GET /health returns 200."""
        line = await stream.read_head(MAX_HEAD_BYTES)
        bodies = {
            b"/query": {"0": {"engine_id": self._engine_id}},
            b"/health": {"status": "healthy"},
        }
        body = bodies.get(line.split(b" ")[0])
        status = "404 Not Found" if body is None else "200 OK"
        text = msgspec.json.encode({"detail": "Not Found"} if body is None else body)
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
        )
        await stream.write(head.encode() + text)
