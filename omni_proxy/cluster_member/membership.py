"""The members of the cluster, and direct calls to members that the store does not reach.

A proxy that is cut off from the store, but not from the workers, may still send them requests. So
each member listens on the address from which it reaches the store, and registers it there; a proxy
that is about to change weights calls members without a lease. Invariants: a registered member
counts until it deregisters, or nothing listens at its address; one that does not answer counts
until its lease has ended. Only messages signed with the cluster's key, which is in the store, are
accepted. A call is (length, HMAC-SHA256, payload); the reply's HMAC covers the call's HMAC.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Literal

import msgspec
import trio
from msgspec import Struct

from omni_proxy.cluster.operation_lease import READ_MEMBERS
from omni_proxy.cluster_member.store_connection import Command, RedisConnection, StoreError
from omni_proxy.shared.decoding import MALFORMED

_log = logging.getLogger(__name__)

CALL_SECS: Final = 1.0
POLL_SECS: Final = 0.1  # interval of calls to a member while weights change
REFRESH_SECS: Final = 1.0  # interval of refreshes of the member list otherwise
FORGET_SECS: Final = 300.0  # a member that is silent for longer is removed
MAX_KNOWN: Final = 256  # known addresses
MAX_CALLS: Final = 16  # calls that are answered concurrently
MAX_BYTES: Final = 8 << 20  # size of one message
MAC_BYTES: Final = 32
LENGTH_BYTES: Final = 4
_ADDRESS: Final = re.compile(r"\S+ ([0-9]{1,5})\Z")
_BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class CallError(Exception):
    """The received bytes are not a valid message of this cluster."""


class MemberCall(Struct, frozen=True, array_like=True):
    """A message for the member with this name; another member at its address does not apply it."""

    member: str
    message: bytes


@dataclass(frozen=True, slots=True)
class CallHandler:
    """Callbacks. `outgoing()`: the message that members without a lease have to apply, or None.

    `apply(message)`: apply another member's message; returns the replies. `take(reply)`: process a
    reply of a called member.
    """

    outgoing: Callable[[], bytes | None]
    apply: Callable[[bytes], Awaitable[Sequence[bytes]]]
    take: Callable[[bytes], None]


class Members:
    """`names()`: names of this member and of the cluster. `lease_ms()`: duration of a lease."""

    def __init__(
        self,
        names: Callable[[], tuple[str, str]],
        lease_ms: Callable[[], int],
        handler: CallHandler,
    ) -> None:
        self._names = names
        self._lease_ms = lease_ms
        self._handler = handler
        self._key = secrets.token_bytes(MAC_BYTES)
        self._address = ""  # this member's host and port
        self._addresses: OrderedDict[str, str] = OrderedDict()  # other members' addresses, by name
        self._live: set[str] = set()
        self._outcomes: dict[str, Literal["answered", "silent"]] = {}  # during this operation
        self._silent_since: dict[str, float] = {}
        self._connection: RedisConnection | None = None

    @property
    def unseen(self) -> list[str]:
        """Members without a lease, which may still send requests."""
        return [name for name in self._addresses if name not in self._live]

    async def connect(self, connection: RedisConnection) -> None:
        """Read the cluster's key and the addresses. Raises StoreError."""
        name = f"{self._names()[1]}:key"
        _, key = await connection.call(("SET", name, self._key, "NX"), ("GET", name))
        self._key = bytes(key) if key else self._key
        self._connection = connection
        await self.refresh(connection)

    def disconnect(self) -> None:
        self._connection = None

    def registration(self) -> list[Command]:
        """Commands that register this member, to be sent with each heartbeat."""
        own, cluster = self._names()
        commands: list[Command] = [
            ("SET", f"{cluster}:lease:{own}", "", "PX", self._lease_ms()),
            ("SADD", f"{cluster}:nodes", own),
        ]
        if self._address:
            commands.append(("HSET", f"{cluster}:addresses", own, self._address))
        return commands

    def farewell(self) -> list[Command]:
        own, cluster = self._names()
        return [
            ("DEL", f"{cluster}:lease:{own}"),
            ("SREM", f"{cluster}:nodes", own),
            ("HDEL", f"{cluster}:addresses", own),
        ]

    def forget(self, member: str) -> None:
        """Remove a member that has deregistered or is lost."""
        self._addresses.pop(member, None)
        self._outcomes.pop(member, None)
        self._silent_since.pop(member, None)

    async def refresh(self, connection: RedisConnection) -> set[str]:
        """Read the member list; return the others with a valid lease. Raises StoreError."""
        own, cluster = self._names()
        nodes, addresses = await connection.call(
            ("SMEMBERS", f"{cluster}:nodes"), ("HGETALL", f"{cluster}:addresses")
        )
        for key, value in addresses.items() if isinstance(addresses, dict) else ():
            name, address = _text(key), _text(value)
            if name and name != own and _is_address(address):
                self._addresses[name] = address
        while len(self._addresses) > MAX_KNOWN:
            self._addresses.popitem(last=False)
        others = sorted({name for key in nodes if (name := _text(key))} - {own})
        if not others:
            self._live = set()
            return self._live
        leases = (f"{cluster}:lease:{name}" for name in others)
        (holds,) = await connection.call(
            ("EVAL", READ_MEMBERS, len(others), *leases, self._lease_ms())
        )
        self._live = {name for name, holds_still in zip(others, holds, strict=True) if holds_still}
        if gone := [name for name in others if name not in self._live]:
            await connection.call(("SREM", f"{cluster}:nodes", *gone))
        return self._live

    async def needed(self) -> set[str]:
        """Members that have to acknowledge. Raises StoreError."""
        if self._connection is None:
            raise StoreError("it is not connected")
        live = await self.refresh(self._connection)
        silent = {name for name, outcome in self._outcomes.items() if outcome == "silent"}
        return live | (set(self.unseen) - silent)

    async def run(self) -> None:
        """Call members without a lease while there is something to apply, until cancelled."""
        looked_at = float("-inf")
        while True:
            await trio.sleep(POLL_SECS)
            message, now = self._handler.outgoing(), trio.current_time()
            if self._connection is not None and (message or now - looked_at > REFRESH_SECS):
                looked_at = now
                with suppress(StoreError), trio.move_on_after(CALL_SECS):
                    await self.refresh(self._connection)
            if message is None:
                self._outcomes.clear()
                continue
            async with trio.open_nursery() as nursery:
                for member in self.unseen:
                    nursery.start_soon(self._call, member, message)

    async def listen(
        self,
        host: str,
        scope: trio.CancelScope,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer calls at `host` until `scope` is cancelled; if it can't listen, only log that."""
        try:
            listeners = await trio.open_tcp_listeners(0, host=host)
        except OSError as error:
            _log.warning(
                "cluster_calls_disabled host=%s error=%s was=cluster_calls_off", host, str(error)
            )
            task_status.started()
            return
        port = listeners[0].socket.getsockname()[1]
        self._address = f"{host} {port}"
        task_status.started()
        limit = trio.CapacityLimiter(MAX_CALLS)

        async def answer(stream: trio.SocketStream) -> None:
            with suppress(trio.WouldBlock, CallError, *_BROKEN):
                limit.acquire_nowait()
                try:
                    with trio.move_on_after(CALL_SECS):
                        await self._answer(stream)
                finally:
                    limit.release()
            await trio.aclose_forcefully(stream)

        with scope:
            await trio.serve_listeners(answer, listeners)

    async def _answer(self, stream: trio.SocketStream) -> None:
        """Answer one call. Raises CallError."""
        payload, mac = await read_message(stream, self._key)
        call = _decode_call(payload)
        replies: Sequence[bytes] = ()
        is_own = call.member == self._names()[0]
        if is_own:
            replies = await self._handler.apply(call.message)
        answer = msgspec.msgpack.encode((is_own, list(replies)))
        await stream.send_all(signed(answer, self._key, mac))

    async def _call(self, member: str, message: bytes) -> None:
        host, _, port = self._addresses[member].partition(" ")
        payload = signed(msgspec.msgpack.encode(MemberCall(member, message)), self._key)
        replies: tuple[bool, list[bytes]] | None = None
        with trio.move_on_after(CALL_SECS), suppress(CallError):
            try:
                async with await trio.open_tcp_stream(host, int(port)) as stream:
                    await stream.send_all(payload)
                    reply, _ = await read_message(stream, self._key, payload[4 : 4 + MAC_BYTES])
                    replies = _decode_reply(reply)
            except _BROKEN as error:
                replies = (False, []) if _is_refused(error) else None
        if replies is None:
            await self._note_silent(member)
        elif replies[0]:
            self._outcomes[member] = "answered"
            self._silent_since.pop(member, None)
            for message in replies[1]:
                self._handler.take(message)
        else:
            await self._remove(member)

    async def _note_silent(self, member: str) -> None:
        now = trio.current_time()
        if member not in self._outcomes:
            _log.warning("cluster_member_silent member=%s", member)
        self._outcomes[member] = "silent"
        if now - self._silent_since.setdefault(member, now) > FORGET_SECS:
            await self._remove(member)

    async def _remove(self, member: str) -> None:
        """Remove a member: it has been silent for too long, or another program listens at its
        address."""
        _log.info("cluster_member_removed member=%s was=cluster_member_gone", member)
        self.forget(member)
        if self._connection is not None:
            with suppress(StoreError):
                addresses = f"{self._names()[1]}:addresses"
                await self._connection.send(("HDEL", addresses, member))


def _text(stored: bytes) -> str:
    """Decode UTF-8; "" for bytes that no member has written."""
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return ""


def _is_address(text: str) -> bool:
    match = _ADDRESS.match(text)
    return match is not None and 0 < int(match[1]) < 1 << 16


def signed(payload: bytes, key: bytes, before: bytes = b"") -> bytes:
    """A signed message. `before`: for a reply, the HMAC of the call."""
    mac = hmac.digest(key, before + payload, sha256)
    return len(payload).to_bytes(LENGTH_BYTES, "big") + mac + payload


async def read_message(
    stream: trio.abc.ReceiveStream, key: bytes, before: bytes = b""
) -> tuple[bytes, bytes]:
    """Read a signed message; return its payload and HMAC. Raises CallError."""
    head = LENGTH_BYTES + MAC_BYTES
    data = bytearray()
    length = 0
    while len(data) < head + length:
        piece = await stream.receive_some(65536)
        if not piece:
            raise CallError("it is incomplete")
        data += piece
        length = int.from_bytes(data[:LENGTH_BYTES], "big") if len(data) >= LENGTH_BYTES else 0
        if length > MAX_BYTES:
            raise CallError("it is too long")
    mac, payload = bytes(data[LENGTH_BYTES:head]), bytes(data[head : head + length])
    if not hmac.compare_digest(mac, hmac.digest(key, before + payload, sha256)):
        raise CallError("it is not signed with the cluster's key")
    return payload, mac


def _decode_call(payload: bytes) -> MemberCall:
    try:
        return msgspec.msgpack.decode(payload, type=MemberCall)
    except MALFORMED:
        raise CallError("it can't be read") from None


def _decode_reply(payload: bytes) -> tuple[bool, list[bytes]]:
    try:
        return msgspec.msgpack.decode(payload, type=tuple[bool, list[bytes]])
    except MALFORMED:
        raise CallError("it can't be read") from None


def _is_refused(error: BaseException) -> bool:
    """Whether the connection was refused, so that nothing listens at the address."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = error.__cause__
    if cause is not None and not isinstance(error, ConnectionRefusedError):
        return _is_refused(cause)
    return isinstance(error, ConnectionRefusedError)
