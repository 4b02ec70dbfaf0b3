"""WebSocket for a relay: both handshakes as heads, and the frames of one side of a session.

wsproto reads and writes the frames. The heads are written here, so that a client's fields reach
the worker unchanged; wsproto's own handshake would rewrite them and refuse hosts that IDNA can't
encode. Invariant: no extension and no subprotocol is ever negotiated, so payloads are forwarded
unchanged, and messages may be refragmented (RFC 6455 5.4).

`SpeechEvents` is the state of a speech session as the worker's text messages report it; it neither
changes nor delays them. Source: the events of `/v1/audio/speech/stream`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, TextMessage
from wsproto.utilities import generate_accept_token

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead
from omni_proxy.wire.response import UpstreamProtocolError, UpstreamResponse

PONGS_HELD_BYTES = 4096  # further pongs are dropped, because the peer pings without reading

_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==\Z")
_FIELD = re.compile(rb"\r\n(?i:(upgrade|sec-websocket-[a-z0-9-]+))[ \t]*:[ \t]*([^\r\n]*)")
_FIELD_LINE = re.compile(rb"(?im)^sec-websocket-[^:\r\n]*:[^\r\n]*\r\n")
_encode = msgspec.json.encode


def accept_handshake(head: RequestHead, lines: bytes = b"") -> bytes:
    """The 101 that accepts a client's handshake, with `lines` added. Raises HttpError 426, 400."""
    if head.upgrade != b"websocket" or head.http_1_0:
        raise _only_websocket("this path supports WebSocket only", close=bool(head.length))
    if head.length:
        raise HttpError(400, "a WebSocket handshake has no body", "bad_handshake", close=True)
    if _fields(b"\r\n" + head.lines).get(b"sec-websocket-version") != b"13":
        error = _only_websocket("only WebSocket version 13 is supported", close=True)
        raise error.with_headers(("sec-websocket-version", "13"))
    if not _KEY.match(head.websocket_key):
        message = "sec-websocket-key must be 16 bytes in base64"
        raise HttpError(400, message, "bad_handshake", close=True)
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: %b\r\n%b\r\n" % (generate_accept_token(head.websocket_key), lines)
    )


def _only_websocket(message: str, *, close: bool) -> HttpError:
    # RFC 9110 15.5.22: a 426 names the required protocol.
    return HttpError(426, message, "upgrade_required", close=close).with_headers(
        ("upgrade", "websocket"), ("connection", "upgrade")
    )


def encode_handshake(lines: bytes, own_lines: bytes, key: bytes) -> bytes:
    """The handshake for a worker, with the client's header lines. `key`: base64 of 16 random
    bytes."""
    return (
        b"%b%bupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n\r\n"
        % (_FIELD_LINE.sub(b"", lines), own_lines, key)
    )


def parse_handshake_response(raw: bytes, key: bytes) -> int:
    """The status of a worker's handshake response. Raises UpstreamProtocolError if it is malformed,
    or a 101 that does not accept this handshake."""
    response = UpstreamResponse()
    response.read_head(raw, to_head=False)
    if response.status == 101:
        fields = _fields(raw)
        if fields.get(b"upgrade", b"").lower() != b"websocket":
            raise UpstreamProtocolError("its 101 is not for WebSocket")
        if fields.get(b"sec-websocket-accept") != generate_accept_token(key):
            raise UpstreamProtocolError("its sec-websocket-accept does not match the key")
        if b"sec-websocket-extensions" in fields or b"sec-websocket-protocol" in fields:
            raise UpstreamProtocolError(
                "it accepts an extension or subprotocol that was not offered"
            )
    return response.status


def _fields(raw: bytes) -> dict[bytes, bytes]:
    return {match[1].lower(): match[2].rstrip(b" \t") for match in _FIELD.finditer(raw)}


class WebSocketFrames:
    """One side of a session: `feed` its bytes and read `events`; bytes to send to it are in `out`.

    `left`: its closing frame or invalid bytes were received; further bytes are ignored.
    `in_message`: the first fragments of a message were sent to it, but not the last.
    """

    __slots__ = ("_parts", "_size", "_ws", "broken", "in_message", "left", "out")

    def __init__(self, kind: ConnectionType) -> None:
        self._ws = Connection(kind)
        self._parts: list[Any] = []
        self._size = 0
        self.out = bytearray()
        self.left = False
        self.broken = False
        self.in_message = False

    def feed(self, piece: bytes) -> None:
        if not self.left:
            self._ws.receive_data(piece)

    def events(self) -> Iterator[Event]:
        """Fragments of messages, and one CloseConnection. Pings are answered here."""
        for event in self._ws.events():
            if isinstance(event, Ping):
                if self._ws.state is ConnectionState.OPEN and len(self.out) < PONGS_HELD_BYTES:
                    self.out += self._ws.send(event.response())
                continue
            if isinstance(event, CloseConnection):
                self.left = True
                # wsproto also reports a protocol violation as a close, but keeps its state.
                self.broken = self._ws.state in (
                    ConnectionState.OPEN,
                    ConnectionState.LOCAL_CLOSING,
                )
            yield event

    def join(self, event: Message[Any], limit: int) -> str | bytes | None:
        """The complete message if this was its last fragment, else None.

        Raises HttpError 413 beyond `limit` bytes.
        """
        data = event.data
        self._size += len(data) if not isinstance(data, str) else len(data.encode())
        if self._size > limit:
            raise HttpError(413, "WebSocket message exceeds payload limit", 413)
        self._parts.append(data)
        if not event.message_finished:
            return None
        empty: str | bytes = "" if isinstance(data, str) else b""
        whole: str | bytes = data if len(self._parts) == 1 else empty.join(self._parts)
        self._parts.clear()
        self._size = 0
        return whole

    def send(self, data: str | bytes, *, finished: bool = True) -> None:
        """Queue a message or its next fragment."""
        event: Message[Any]
        if isinstance(data, str):
            event = TextMessage(data=data, message_finished=finished)
        else:
            event = BytesMessage(data=data, message_finished=finished)
        self.out += self._ws.send(event)
        self.in_message = not finished

    def close(self, code: int, reason: str) -> None:
        """Queue the closing frame, or the reply to the peer's; later calls do nothing."""
        if self._ws.state in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
            self.out += self._ws.send(CloseConnection(code=code, reason=reason))


def error_event(error: HttpError) -> str:
    """An error of the proxy as a message of the session (note:omni-router 12)."""
    event = {"type": "error", "message": error.message, "error_type": error.type}
    numeric = isinstance(error.code, int)
    reason = error.extra.get("reason") if numeric else error.code
    more = {"code": error.code if numeric else error.status, "reason": reason}
    return _encode({**event, **{key: value for key, value in more.items() if value}}).decode()


def close_code(status: int) -> int:
    """The closing code for an error of the proxy (note:omni-router 12)."""
    special = {413: 1009, 429: 1013, 503: 1013}
    return special.get(status, 1008 if status < 500 else 1011)


MAX_EVENT_BYTES = 65536

# With these codes the session failed, but the worker is healthy (note:omni-router 12).
_APPLICATION_CODES = frozenset((1002, 1003, 1007, 1008, 1009, 1010, 1013))


def is_application_code(code: int) -> bool:
    return code in _APPLICATION_CODES or 3000 <= code <= 4999


class _Event(msgspec.Struct):
    type: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class SpeechEvents:
    """Flags: session.done, an error event, and a failed sentence (`failed_audio`) were received.

    Unreadable messages, and messages longer than any event of the protocol, are ignored.
    """

    __slots__ = ("_parts", "_size", "done", "error", "failed_audio")

    def __init__(self) -> None:
        self.done = self.error = self.failed_audio = False
        self._parts: list[str] = []
        self._size = 0

    def feed(self, piece: str, *, finished: bool) -> None:
        """The next fragment of a text message."""
        self._size += len(piece)
        if self._size <= MAX_EVENT_BYTES:
            self._parts.append(piece)
        if finished:
            if self._size <= MAX_EVENT_BYTES:
                self._read("".join(self._parts))
            self._parts.clear()
            self._size = 0

    def _read(self, text: str) -> None:
        try:
            event = _decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return
        if event.type == "session.done":
            self.done = True
        elif event.type == "error":
            self.error = True
        elif event.type == "audio.done" and event.error:
            self.failed_audio = True
