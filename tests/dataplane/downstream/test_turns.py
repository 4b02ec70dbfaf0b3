"""How much work the event loop does for one connection before it runs the others."""

import pytest
from wsproto.utilities import generate_accept_token

from omni_proxy.dataplane.loop.stream import READ_BYTES
from omni_proxy.dataplane.loop.task import READS_PER_STEP
from omni_proxy.dataplane.relay.request_body import CHUNKED_READ_BYTES
from omni_proxy.dataplane.websocket_relay import CONFIG_READ_BYTES
from tests.dataplane.manual_loop import QUIET_SECS, ManualLoop, read_available

CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n"
    b"content-type: application/json\r\n\r\n"
)
BODY = b'{"messages": []}'
REJECTED = b"PUT /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\n\r\n"
UPGRADE = (
    b"GET /v1/audio/speech/stream HTTP/1.1\r\nhost: proxy\r\nupgrade: websocket\r\n"
    b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, PING = 0x81, 0x89
PIECES = 5
AT_ONCE = 2


@pytest.fixture
def proxy():
    manual_loop = ManualLoop()
    yield manual_loop
    manual_loop.close()


def chunks(payload):
    return b"".join(b"1\r\n%c\r\n" % byte for byte in payload)


def frame(kind, payload=b""):
    """A frame of a client, masked with zeros."""
    size = len(payload)
    length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes((kind,)) + length + bytes(4) + payload


def run_batch(proxy):
    """Run one batch of events. A task that yields in it is resumed once, at its end."""
    loop = proxy.dataplane.loop
    loop._run_batch(loop._epoll.poll(QUIET_SECS))


def exchange(proxy):
    (task,) = proxy.dataplane.loop.tasks
    return task.exchange


def session(proxy):
    """A client and a worker with an open websocket session; no bytes are pending."""
    client = proxy.client(UPGRADE)
    proxy.send_from(client, frame(TEXT, b'{"type":"session.config","session":{"model":"m"}}'))
    worker = proxy.worker()
    lines = worker.recv(65536).split(b"\r\n")
    key = next(line for line in lines if line.startswith(b"sec-websocket-key: "))[19:]
    proxy.send_from(
        worker,
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % generate_accept_token(key),
    )
    return client, worker


def test_reading_small_chunks_yields(proxy):
    client = proxy.client(CHUNKED)
    body = BODY + b" " * CHUNKED_READ_BYTES
    client.sendall(chunks(body))
    run_batch(proxy)
    assert exchange(proxy).bytes_in <= AT_ONCE * CHUNKED_READ_BYTES // len(chunks(b" "))
    proxy.run_until_idle()
    proxy.send_from(client, b"0\r\n\r\n")
    assert proxy.worker().recv(1 << 20).endswith(b"\r\n\r\n" + body)


def test_large_chunks_are_read_without_yielding(proxy):
    client = proxy.client(CHUNKED)
    size = PIECES * CHUNKED_READ_BYTES
    client.sendall(b"%x\r\n%b" % (size, bytes(size)))
    run_batch(proxy)
    assert exchange(proxy).bytes_in == size


def test_answering_many_rejected_requests_yields(proxy):
    client = proxy.client()
    count = PIECES * READS_PER_STEP
    client.sendall(REJECTED * count)
    run_batch(proxy)
    assert len(proxy.log) <= AT_ONCE * READS_PER_STEP
    proxy.run_until_idle()
    replies, end = read_available(client)
    assert (replies.count(b"HTTP/1.1 405 "), len(proxy.log), end) == (count, count, "open")


@pytest.mark.parametrize(
    "message", [frame(TEXT, b'{"type":"input.text"}'), frame(PING)], ids=["texts", "pings"]
)
def test_a_client_that_sends_without_pause_yields(proxy, message):
    client, _ = session(proxy)
    before = exchange(proxy).bytes_in
    sent = message * (PIECES * READ_BYTES // len(message))
    client.sendall(sent)
    run_batch(proxy)
    assert exchange(proxy).bytes_in - before <= AT_ONCE * READ_BYTES
    proxy.run_until_idle()
    assert exchange(proxy).bytes_in - before == len(sent)


def test_a_client_without_a_complete_first_message_yields_too(proxy):
    client = proxy.client(UPGRADE)
    sent = frame(PING) * (PIECES * CONFIG_READ_BYTES // len(frame(PING)))
    client.sendall(sent)
    run_batch(proxy)
    assert exchange(proxy).bytes_in <= AT_ONCE * CONFIG_READ_BYTES
    proxy.run_until_idle()
    assert exchange(proxy).bytes_in == len(sent)


def test_a_worker_that_sends_without_pause_yields(proxy):
    client, worker = session(proxy)
    read_available(client)
    # Of this size no read ends at the end of an event.
    event = b"\x81\x1e" + b'{"type":"audio.sent"}'.ljust(30)
    count = PIECES * READ_BYTES // len(event)
    worker.sendall(event * count)
    run_batch(proxy)
    assert exchange(proxy).chunks <= AT_ONCE * READ_BYTES // len(event)
    proxy.run_until_idle()
    assert exchange(proxy).chunks == count
