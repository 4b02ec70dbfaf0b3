"""Clients and a worker that misbehave, which must not harm the proxy; each ends by itself."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable

import trio
from wsproto.utilities import generate_accept_token

from tests.promises.support.clients import STREAMED, Client, post
from tests.promises.support.dataplane_fixture import RunningDataPlane
from tests.promises.support.early_readers import BOUNDARY, FILE, FORM, HINTS, MIB, SPOKEN, head
from tests.promises.support.fakes import PATIENCE_SECS, SSE_HEAD, Call, chunk, counted
from tests.promises.support.tls_helpers import client_context

Hostile = Callable[[RunningDataPlane, Client], Awaitable[None]]

LAST = "connection: close"
LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\n"
KEY = base64.b64encode(bytes(16)).decode()
UPGRADE = (
    "GET /v1/audio/speech/stream HTTP/1.1\r\nhost: proxy\r\nupgrade: websocket\r\n"
    f"connection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: {KEY}\r\n\r\n"
).encode()
SESSION = b'{"type":"session.config","session":{"model":"m"}}'
FLOOD_BYTES = 8 * MIB  # more than all socket buffers on its way hold


def wants(behaviour: str) -> bytes:
    """Returns a body that makes `worker` behave in this way."""
    return b'{"messages": [], "user": "%b"}' % behaviour.encode()


async def worker(call: Call) -> None:
    """Behaves as the body requests; closes each connection, so that the proxy pools none."""
    if b"upgrade: websocket" in call.head.lower():
        await _speak(call)
    elif b"silent" in call.body:
        await call.until_left()
    elif b'"stream": true' in call.body:
        await call.send(SSE_HEAD, chunk(b"data: one\n\n"))
        await call.until_left()
    elif b"flood" in call.body:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % FLOOD_BYTES)
        for _ in range(FLOOD_BYTES // MIB):
            await call.send(bytes(MIB))
    elif b"reset" in call.body:
        call.reset()
        return
    elif b"cut" in call.body:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nnot all")
    elif b"torn" in call.body:
        await call.send(SSE_HEAD, chunk(b"data: one\n\n"), b"zz\r\n")
    elif b"garbage" in call.body:
        await call.send(b"\x00\x01 what?\r\n\r\n")
    else:
        await call.send(counted(b"{}", "connection: close"))
    call.close()


async def _speak(call: Call) -> None:
    key = next(value for name, value in call.fields if name == "sec-websocket-key")
    accepted = generate_accept_token(key.encode()).decode()
    await call.send(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % accepted.encode()
    )
    message = await call.receive()
    if b"cut" not in _unmasked(message):
        await call.until_left()
    call.close()


def frame(text: bytes, opcode: int = 1) -> bytes:
    """Returns a client's frame, masked with zeros, of at most 125 bytes."""
    return bytes([0x80 | opcode, 0x80 | len(text)]) + bytes(4) + text


def _unmasked(piece: bytes) -> bytes:
    """Returns the payload of one frame of at most 125 bytes."""
    mask, text = piece[2:6], piece[6:]
    return bytes(byte ^ mask[n % 4] for n, byte in enumerate(text))


def sends(*pieces: bytes, cut: bool = False) -> Hostile:
    """Sends, and closes the connection at once; `cut` resets it."""

    async def hostile(opened: RunningDataPlane, client: Client) -> None:
        await client.send(*pieces)
        if cut:
            client.reset()

    return hostile


def stays(*pieces: bytes) -> Hostile:
    """Sends, and waits until the proxy closes the connection."""

    async def hostile(opened: RunningDataPlane, client: Client) -> None:
        await client.send(*pieces)
        await client.until_closed()

    return hostile


def leaves_at(awaited: bytes, *pieces: bytes, more: bytes = b"") -> Hostile:
    """Sends, waits for part of a response, sends `more`, and resets the connection."""

    async def hostile(opened: RunningDataPlane, client: Client) -> None:
        await client.send(*pieces)
        while awaited not in client.rest:
            piece = await client.receive()
            if not piece:
                return  # the proxy closed it earlier
            client.rest += piece
        await client.send(more)
        client.reset()

    return hostile


def half_closes(*pieces: bytes) -> Hostile:
    async def hostile(opened: RunningDataPlane, client: Client) -> None:
        await client.send(*pieces)
        with contextlib.suppress(OSError):  # the proxy closed it earlier
            client.stream.socket.shutdown(socket.SHUT_WR)
        await client.until_closed()

    return hostile


async def never_reads(opened: RunningDataPlane, client: Client) -> None:
    """Requests more than the socket buffers hold, and reads only the first part."""
    client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await client.send(post(wants("flood")))
    await client.receive()
    with trio.fail_after(PATIENCE_SECS):
        while opened.dataplane.in_flight:
            await trio.sleep(0.01)


def trickles(pieces: list[bytes]) -> Hostile:
    """Sends the pieces one by one, and then nothing."""

    async def hostile(opened: RunningDataPlane, client: Client) -> None:
        for piece in pieces:
            await client.send(piece)
            await trio.lowlevel.checkpoint()
        await client.until_closed()

    return hostile


async def shakes_hands(
    opened: RunningDataPlane, client: Client
) -> trio.SSLStream[trio.SocketStream]:
    secure = trio.SSLStream(
        client.stream, BELIEVING, server_hostname="localhost", https_compatible=True
    )
    await secure.do_handshake()
    return secure


def cut_below_tls(*pieces: bytes, awaited: bytes = b"") -> Hostile:
    """Sends over TLS, waits for part of a response, and resets without a TLS alert."""

    async def hostile(opened: RunningDataPlane, client: Client) -> None:
        secure = await shakes_hands(opened, client)
        await secure.send_all(b"".join(pieces))
        received = b""
        while awaited not in received:
            piece = await secure.receive_some()
            if not piece:
                return
            received += piece
        client.reset()

    return hostile


def _hello() -> bytes:
    """Returns the first bytes of a TLS client."""
    outgoing = ssl.MemoryBIO()
    tls = BELIEVING.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


BELIEVING = client_context()
HELLO = _hello()
CHUNKED = LINE + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
UPLOAD = head(3 * MIB, *HINTS)
FORM_UPLOAD = head(3 * MIB, path=SPOKEN, kind=BOUNDARY) + FORM + FILE
Family = dict[str, Hostile]  # by what the client does

HEADS: Family = {
    "says nothing and leaves": sends(),
    "says nothing and stays": stays(),
    "half a head and leaves": sends(LINE),
    "half a head and a reset": sends(LINE, cut=True),
    "half a head and stays": stays(LINE),
    "a head in pieces, never whole": trickles([LINE[n : n + 8] for n in range(0, len(LINE), 8)]),
    "TLS bytes": stays(HELLO),
    "the preface of HTTP/2": stays(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "two lengths": stays(LINE + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab"),
    "an endless head": stays(LINE + b"x-a: b\r\n" * 20_000),
}
BODIES: Family = {
    "half a body and leaves": sends(head(4096), bytes(100)),
    "half a body and a reset": sends(head(4096), bytes(100), cut=True),
    "half a body and stays": stays(head(4096), bytes(100)),
    "half of a held body and a reset": sends(head(900_000), bytes(500_000), cut=True),
    "a bad chunk": stays(CHUNKED + b"zz\r\n"),
    "a chunk of overflowing size": stays(CHUNKED + b"f" * 40 + b"\r\n"),
    "a chunk cut": sends(CHUNKED + b"5\r\nab", cut=True),
    "chunks never ended": stays(CHUNKED + b"2\r\n{}\r\n"),
    "no JSON": sends(post(b"\xff{")),
    "asks to go on and leaves": leaves_at(b"100 Continue", head(9, "expect: 100-continue")),
    "an upload aborted": sends(UPLOAD, bytes(65536), cut=True),
    "an upload that stops": stays(UPLOAD, bytes(65536)),
    "a form aborted": sends(FORM_UPLOAD, bytes(65536), cut=True),
    "a form that stops": stays(FORM_UPLOAD, bytes(65536)),
}
ANSWERS: Family = {
    "a request and leaves": sends(post()),
    "a request and a reset": sends(post(wants("silent")), cut=True),
    "half-closes": half_closes(post(wants("silent"))),
    "a reset in mid-stream": leaves_at(b"one\n\n", post(STREAMED)),
    "more in mid-stream, then a reset": leaves_at(b"one\n\n", post(STREAMED), more=post()),
    "an answer half read": leaves_at(b"\r\n\r\n", post(wants("flood"))),
    "an answer never read": never_reads,
    "twenty requests and a reset": sends(*[post()] * 20, cut=True),
}
WORKERS: Family = {
    "that is silent": stays(post(wants("silent"), LAST)),
    "that resets": stays(post(wants("reset"), LAST)),
    "that cuts": stays(post(wants("cut"), LAST)),
    "that tears its stream": stays(post(wants("torn"), LAST)),
    "that talks garbage": stays(post(wants("garbage"), LAST)),
}
WEBSOCKETS: Family = {
    "cut before a word": leaves_at(b"\r\n\r\n", UPGRADE),
    "silent before a word": stays(UPGRADE),
    "cut after its session began": leaves_at(b"\r\n\r\n", UPGRADE, more=frame(SESSION)),
    "of garbage": stays(UPGRADE, b"\xff" * 64),
    "whose worker cuts": stays(UPGRADE, frame(SESSION.replace(b"{", b'{"x":"cut",', 1))),
    "that falls silent": stays(UPGRADE, frame(SESSION)),
}
SECURE: Family = {
    "no TLS": stays(post()),
    "half a hello and leaves": sends(HELLO[:50]),
    "half a hello and stays": stays(HELLO[:50]),
    "a hello and a reset": sends(HELLO, cut=True),
    "a hello and stays": stays(HELLO),
    "cut after the handshake": cut_below_tls(),
    "half a body below TLS": cut_below_tls(head(4096), bytes(100)),
    "a stream cut below TLS": cut_below_tls(post(STREAMED), awaited=b"one\n\n"),
    "an upload cut below TLS": cut_below_tls(UPLOAD, bytes(65536)),
}
PROXY_HEADERS: Family = {
    "no header": stays(post()),
    "half a header and leaves": sends(b"PROXY TCP4 "),
    "half a header and stays": stays(b"PROXY TCP4 "),
    "an invalid header": stays(b"PROXY TCP4 nonsense\r\n"),
    "a header and a reset": sends(b"PROXY UNKNOWN\r\n" + post(wants("silent")), cut=True),
}
QUEUED: Family = {
    "waits for its turn": stays(post(wants("silent"), LAST)),
    "leaves the queue": half_closes(post(wants("silent"))),
    "is reset in the queue": sends(post(wants("silent")), cut=True),
}
