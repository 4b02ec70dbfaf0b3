import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.connection import ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Message, TextMessage
from wsproto.frame_protocol import CloseReason

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import parse_request_head
from omni_proxy.wire.response import UpstreamProtocolError
from omni_proxy.wire.websocket import (
    WebSocketFrames,
    accept_handshake,
    close_code,
    encode_handshake,
    error_event,
    parse_handshake_response,
)

# The example of RFC 6455 1.3.
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
TOKEN = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def opening(*fields, line=b"GET /s HTTP/1.1"):
    required = (b"host: x", b"connection: Upgrade", b"upgrade: WebSocket")
    return parse_request_head(b"\r\n".join((line, *required, *fields, b"", b"")))


VERSION, KEYED = b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: " + KEY


def test_a_handshake_is_accepted_with_the_token_of_its_key():
    response = accept_handshake(opening(VERSION, KEYED), b"x: y\r\n")
    assert response.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert b"\r\nsec-websocket-accept: " + TOKEN + b"\r\n" in response
    assert response.endswith(b"\r\nx: y\r\n\r\n")


@pytest.mark.parametrize(
    ("fields", "line", "status"),
    [
        ((), b"GET /s HTTP/1.1", 426),
        ((KEYED,), b"GET /s HTTP/1.1", 426),
        ((KEYED, b"sec-websocket-version: 8"), b"GET /s HTTP/1.1", 426),
        ((KEYED, VERSION), b"GET /s HTTP/1.0", 426),
        ((VERSION,), b"GET /s HTTP/1.1", 400),
        ((VERSION, b"sec-websocket-key: dGhl"), b"GET /s HTTP/1.1", 400),
        ((VERSION, KEYED, b"content-length: 1"), b"GET /s HTTP/1.1", 400),
    ],
)
def test_an_invalid_handshake_is_rejected(fields, line, status):
    with pytest.raises(HttpError) as caught:
        accept_handshake(opening(*fields, line=line))
    assert caught.value.status == status
    if status == 426:
        assert ("upgrade", "websocket") in caught.value.headers


def test_the_handshake_to_a_worker_has_the_clients_other_fields():
    head = opening(VERSION, KEYED, b"A: b", b"sec-websocket-protocol: c", b"a: d")
    assert encode_handshake(head.lines, b"host: w\r\n", KEY) == (
        b"GET /s HTTP/1.1\r\nA: b\r\na: d\r\nhost: w\r\n"
        b"upgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: " + KEY + b"\r\n\r\n"
    )


def reply(*fields, status=b"101 Switching Protocols"):
    return b"\r\n".join((b"HTTP/1.1 " + status, *fields, b"", b""))


ACCEPTED = (b"Upgrade: WebSocket", b"Connection: upgrade", b"Sec-WebSocket-Accept: " + TOKEN)


def test_the_status_of_a_workers_handshake_response():
    assert parse_handshake_response(reply(*ACCEPTED), KEY) == 101
    assert parse_handshake_response(reply(b"content-length: 0", status=b"503 No"), KEY) == 503


@pytest.mark.parametrize(
    "fields",
    [
        ACCEPTED[1:],
        ACCEPTED[:2],
        (b"Upgrade: h2c", *ACCEPTED[1:]),
        (*ACCEPTED[:2], b"Sec-WebSocket-Accept: AAAA"),
        (*ACCEPTED, b"Sec-WebSocket-Protocol: chat"),
        (*ACCEPTED, b"Sec-WebSocket-Extensions: permessage-deflate"),
    ],
)
def test_a_101_that_does_not_match_the_handshake_is_an_error(fields):
    with pytest.raises(UpstreamProtocolError):
        parse_handshake_response(reply(*fields), KEY)


def pair():
    return WebSocketFrames(ConnectionType.CLIENT), WebSocketFrames(ConnectionType.SERVER)


def carry(sender, receiver, size=1 << 20):
    """Move all output of the sender in pieces of `size`; returns the events of the receiver."""
    wire, events = bytes(sender.out), []
    sender.out.clear()
    for at in range(0, len(wire), size):
        receiver.feed(wire[at : at + size])
        events += receiver.events()
    return events


@given(st.lists(st.text(max_size=300) | st.binary(max_size=300), max_size=4), st.integers(1, 50))
def test_messages_in_any_pieces_are_joined(messages, size):
    client, server = pair()
    for message in messages:
        client.send(message)
    joined = [server.join(event, 1 << 20) for event in carry(client, server, size)]
    assert [message for message in joined if message is not None] == messages


def test_a_message_may_be_sent_in_parts():
    client, server = pair()
    client.send("one ", finished=False)
    assert client.in_message
    client.send("two")
    assert not client.in_message
    assert [server.join(event, 100) for event in carry(client, server)] == [None, "one two"]


@pytest.mark.parametrize("message", ["ü" * 50, b"x" * 100])
def test_a_message_is_measured_in_bytes_over_all_its_parts(message):
    client, server = pair()
    client.send(message[:20], finished=False)
    client.send(message[20:])
    assert [server.join(event, 100) for event in carry(client, server)][-1] == message
    client.send(message)
    [event] = carry(client, server)
    with pytest.raises(HttpError, match="exceeds payload limit"):
        server.join(event, 99)


def test_a_ping_is_answered_and_the_pongs_for_a_flood_are_bounded():
    client, server = pair()
    ping = bytes([0x89, 0x84, 0, 0, 0, 0]) + b"ping"
    server.feed(ping)
    assert list(server.events()) == []
    assert server.out == bytes([0x8A, 4]) + b"ping"
    server.feed(ping * 10_000)
    assert list(server.events()) == []
    assert len(server.out) < 5000
    assert client.out == b""


def test_a_close_is_reported_once_and_answered_once():
    client, server = pair()
    client.close(4000, "bye")
    client.close(4001, "again")
    [event] = carry(client, server)
    assert event == CloseConnection(code=4000, reason="bye")
    assert (server.left, server.broken) == (True, False)
    server.feed(b"bytes after the close")
    assert list(server.events()) == []
    server.close(event.code, event.reason)
    assert [type(event) for event in carry(server, client)] == [CloseConnection]
    client.feed(b"\x81\x00")
    assert list(client.events()) == []


def test_a_close_without_a_code_stays_without_one():
    client, server = pair()
    client.close(CloseReason.NO_STATUS_RCVD, "")
    [event] = carry(client, server)
    server.close(event.code, event.reason or "")
    assert server.out == bytes([0x88, 0])


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\x81\x01a", 1002),
        (b"\x83\x80\x00\x00\x00\x00", 1002),
        (b"\xc1\x80\x00\x00\x00\x00", 1002),
        (b"\x80\x80\x00\x00\x00\x00", 1002),
        (b"\x09\x80\x00\x00\x00\x00", 1002),
        (b"\x88\x82\x00\x00\x00\x00\x03\xed", 1002),
        (b"\x81\x81\x00\x00\x00\x00\xff", 1007),
    ],
    ids=["unmasked", "opcode", "reserved", "continuation", "cut ping", "local code", "utf-8"],
)
def test_invalid_frames_break_the_sending_side(raw, code):
    _, server = pair()
    server.feed(raw)
    [event] = [event for event in server.events() if not isinstance(event, Message)]
    assert (int(event.code), server.left, server.broken) == (code, True, True)


def test_messages_of_both_kinds_keep_their_kind():
    client, server = pair()
    client.send("text")
    client.send(b"bytes")
    assert [type(event) for event in carry(client, server)] == [TextMessage, BytesMessage]


def test_an_error_event_has_the_status_and_the_reason():
    error = HttpError(503, "no eligible upstream", "none_healthy")
    assert json.loads(error_event(error)) == {
        "type": "error", "message": "no eligible upstream", "error_type": "server_error",
        "code": 503, "reason": "none_healthy",
    }  # fmt: skip
    error = HttpError(413, "too long", 413)
    assert json.loads(error_event(error)) == {
        "type": "error", "message": "too long", "error_type": "invalid_request_error", "code": 413,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, 1008), (404, 1008), (413, 1009), (429, 1013), (502, 1011), (503, 1013), (504, 1011)],
)
def test_each_status_has_a_close_code(status, code):
    assert close_code(status) == code
