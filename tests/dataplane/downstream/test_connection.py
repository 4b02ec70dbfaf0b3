"""Transcripts of one client connection: pipelining, keep-alive, errors and closes."""

import contextlib

import pytest

from tests.dataplane.both_drivers import OK_RESPONSE, World, chat_request, worker_sockets
from tests.dataplane.transcript import play

REQUEST = chat_request()
LAST = chat_request(fields=(b"connection: close",))
POST_LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
RESPONSE = [("worker", "sends", OK_RESPONSE), ("client", "gets", OK, b"{}")]

TRANSCRIPTS = {
    "two requests in one read are sent one after the other": [
        ("client", "sends", REQUEST + REQUEST),
        ("worker", "gets", POST_LINE),
        *RESPONSE,
        ("worker", "gets", POST_LINE),
        *RESPONSE,
        ("phases", "are", "idle"),
    ],
    "empty lines before a request are skipped": [
        ("client", "sends", b"\r\n\r\n" + REQUEST),
        ("worker", "gets", POST_LINE),
        *RESPONSE,
    ],
    "half of an empty line is incomplete": [
        ("client", "sends", b"\r"),
        ("phases", "are", "idle"),
        ("client", "sends", b"\n" + REQUEST),
        ("worker", "gets", POST_LINE),
        *RESPONSE,
    ],
    "a request with connection: close is the last": [
        ("client", "sends", LAST),
        ("worker", "gets", POST_LINE),
        ("worker", "sends", OK_RESPONSE),
        ("client", "gets", OK, b"connection: close\r\n", b"{}"),
        ("client", "is", "closed"),
    ],
    "a head that is not HTTP gets a 400 and the connection closes": [
        ("client", "sends", b"HELLO\r\n\r\n"),
        ("client", "gets", b"HTTP/1.1 400 ", b"connection: close\r\n"),
        ("client", "is", "closed"),
    ],
    "a method that is not allowed leaves the connection open": [
        ("client", "sends", b"PUT /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("client", "gets", b"HTTP/1.1 405 ", b"allow: POST\r\n"),
        ("client", "is", "open"),
        ("client", "sends", REQUEST),
        ("worker", "gets", POST_LINE),
        *RESPONSE,
    ],
    "a client may close before its head is complete": [
        ("client", "sends", REQUEST[:20]),
        ("phases", "are", "head"),
        ("client", "closes"),
        ("phases", "are"),
    ],
    "a client that half-closes has disconnected": [
        ("client", "sends", REQUEST),
        ("worker", "gets", POST_LINE),
        ("client", "half-closes"),
        ("worker", "is", "closed"),
        ("phases", "are"),
    ],
}


@pytest.fixture
def world(tmp_path):
    with contextlib.ExitStack() as stack:
        sockets = worker_sockets(tmp_path)
        listeners = {name: stack.enter_context(sock) for name, sock in sockets.items()}
        yield stack.enter_context(World(listeners, "[server]\nlog_format = 'json'\n").patched())


@pytest.mark.parametrize("warm", [0, 4], ids=["new", "warm"])
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_a_connection(world, name, warm):
    client = world.connect_client(warm=warm)
    play(world, client, *TRANSCRIPTS[name])
    world.finish()
    assert not world.dataplane.loop.tasks
    assert (world.dataplane.in_flight, world.dataplane.inflight.held_bytes) == (0, 0)
