"""How much of one connection is done before the others have their turn."""

import pytest
from wsproto.utilities import generate_accept_token

from omni_proxy.dataplane.exchange.request_body import CHUNKED_READ_BYTES
from omni_proxy.dataplane.loop.io_task import READ_BYTES
from omni_proxy.dataplane.loop.task import READS_PER_STEP
from omni_proxy.dataplane.websocket.relay import CONFIG_READ_BYTES
from tests.dataplane.manual_loop import QUIET_SECS, ManualLoop, received

CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n"
    b"content-type: application/json\r\n\r\n"
)
BODY = b'{"messages": []}'
REFUSED = b"PUT /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\n\r\n"
UPGRADE = (
    b"GET /v1/audio/speech/stream HTTP/1.1\r\nhost: proxy\r\nupgrade: websocket\r\n"
    b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, PING = 0x81, 0x89
PIECES = 5
AT_ONCE = 2


@pytest.fixture
def dataplane():
    made = ManualLoop()
    yield made
    made.close()


def chunks(payload):
    return b"".join(b"1\r\n%c\r\n" % byte for byte in payload)


def frame(kind, payload=b""):
    """As a client masks it, with zeros."""
    size = len(payload)
    length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes((kind,)) + length + bytes(4) + payload


def batch(dataplane):
    """One of events; whoever gives up his turn in it has one more at its end."""
    loop = dataplane.dataplane.loop
    loop._run_batch(loop._epoll.poll(QUIET_SECS))


def exchange(dataplane):
    (task,) = dataplane.dataplane.loop.tasks
    return task.exchange


def session(dataplane):
    """A client and a worker that have one, and have said all that they had to."""
    client = dataplane.client(UPGRADE)
    dataplane.tell(client, frame(TEXT, b'{"type":"session.config","session":{"model":"m"}}'))
    worker = dataplane.worker()
    lines = worker.recv(65536).split(b"\r\n")
    key = next(line for line in lines if line.startswith(b"sec-websocket-key: "))[19:]
    dataplane.tell(
        worker,
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % generate_accept_token(key),
    )
    return client, worker


def test_the_smallest_chunks_are_read_piece_by_piece(dataplane):
    client = dataplane.client(CHUNKED)
    body = BODY + b" " * CHUNKED_READ_BYTES
    client.sendall(chunks(body))
    batch(dataplane)
    assert exchange(dataplane).bytes_in <= AT_ONCE * CHUNKED_READ_BYTES // len(chunks(b" "))
    dataplane.turn()
    dataplane.tell(client, b"0\r\n\r\n")
    assert dataplane.worker().recv(1 << 20).endswith(b"\r\n\r\n" + body)


def test_large_chunks_need_no_turn_each(dataplane):
    client = dataplane.client(CHUNKED)
    size = PIECES * CHUNKED_READ_BYTES
    client.sendall(b"%x\r\n%b" % (size, bytes(size)))
    batch(dataplane)
    assert exchange(dataplane).bytes_in == size


def test_requests_that_are_refused_at_once_are_answered_some_at_a_time(dataplane):
    client = dataplane.client()
    many = PIECES * READS_PER_STEP
    client.sendall(REFUSED * many)
    batch(dataplane)
    assert len(dataplane.log) <= AT_ONCE * READS_PER_STEP
    dataplane.turn()
    answers, end = received(client)
    assert (answers.count(b"HTTP/1.1 405 "), len(dataplane.log), end) == (many, many, "open")


@pytest.mark.parametrize(
    "message", [frame(TEXT, b'{"type":"input.text"}'), frame(PING)], ids=["texts", "pings"]
)
def test_a_client_that_sends_without_pause_yields(dataplane, message):
    client, _ = session(dataplane)
    before = exchange(dataplane).bytes_in
    sent = message * (PIECES * READ_BYTES // len(message))
    client.sendall(sent)
    batch(dataplane)
    assert exchange(dataplane).bytes_in - before <= AT_ONCE * READ_BYTES
    dataplane.turn()
    assert exchange(dataplane).bytes_in - before == len(sent)


def test_a_client_without_a_complete_first_message_yields_too(dataplane):
    client = dataplane.client(UPGRADE)
    sent = frame(PING) * (PIECES * CONFIG_READ_BYTES // len(frame(PING)))
    client.sendall(sent)
    batch(dataplane)
    assert exchange(dataplane).bytes_in <= AT_ONCE * CONFIG_READ_BYTES
    dataplane.turn()
    assert exchange(dataplane).bytes_in == len(sent)


def test_a_worker_that_sends_without_pause_yields(dataplane):
    client, worker = session(dataplane)
    received(client)
    event = b"\x81\x1e" + b'{"type":"audio.sent"}'.ljust(30)  # so that no piece ends in one
    many = PIECES * READ_BYTES // len(event)
    worker.sendall(event * many)
    batch(dataplane)
    assert exchange(dataplane).chunks <= AT_ONCE * READ_BYTES // len(event)
    dataplane.turn()
    assert exchange(dataplane).chunks == many
