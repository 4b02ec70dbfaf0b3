"""Complete exchanges as transcripts, each run without and with the fast path."""

import contextlib

import pytest

from tests.dataplane.both_drivers import (
    OK_RESPONSE,
    chat_request,
    run_fast_and_slow,
    worker_sockets,
)
from tests.dataplane.transcript import play

REQUEST = chat_request()
POST_LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAMED = chat_request(body=b'{"messages": [], "stream": true}')
EVENT = b"b\r\ndata: one\n\n\r\n"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
ONCE = [
    ("client", "sends", REQUEST),
    ("worker", "gets", POST_LINE, b"host: ", b"content-length: 16\r\n\r\n", b'{"messages": []}'),
    ("client", "gets nothing"),
    ("worker", "sends", OK_RESPONSE),
    ("client", "gets", OK, b"X-SGLang-Omni-Worker: ", b"Route-Attempt: 1\r\n", b"\r\n{}"),
    ("phases", "are", "idle"),
]

# The steps, the number of exchanges that begin on the fast path, and of those a coroutine ends.
TRANSCRIPTS = {
    "one request": (ONCE, 1, 0),
    "three requests on one connection": (ONCE * 3, 3, 0),
    "a request in two pieces": (
        [
            ("client", "sends", REQUEST[:30]),
            ("client", "gets nothing"),
            ("phases", "are", "head"),
            ("client", "sends", REQUEST[30:]),
            ("worker", "gets", POST_LINE),
            ("worker", "sends", OK_RESPONSE),
            ("client", "gets", OK),
        ],
        0,
        0,
    ),
    "a response in two pieces": (
        [
            ("client", "sends", REQUEST),
            ("worker", "gets", POST_LINE),
            ("worker", "sends", OK_RESPONSE[:-1]),
            ("client", "gets", OK),
            ("worker", "sends", OK_RESPONSE[-1:]),
            ("client", "gets", b"}"),
            ("phases", "are", "idle"),
        ],
        1,
        1,
    ),
    "a stream": (
        [
            ("client", "sends", STREAMED),
            ("worker", "gets", POST_LINE),
            ("worker", "sends", SSE + EVENT),
            ("client", "gets", OK, EVENT),
            ("worker", "sends", EVENT, EVENT),
            ("client", "gets", EVENT, EVENT),
            ("worker", "sends", b"0\r\n\r\n"),
            ("client", "gets", b"0\r\n\r\n"),
            ("client", "is", "open"),
        ],
        1,
        1,
    ),
    "a stream that breaks": (
        [
            ("client", "sends", STREAMED),
            ("worker", "gets", POST_LINE),
            ("worker", "sends", SSE + EVENT),
            ("client", "gets", OK, EVENT),
            ("worker", "closes"),
            ("client", "gets", b"upstream stream failed before completion"),
            ("client", "is", "closed"),
        ],
        1,
        1,
    ),
    "a client that disconnects": (
        [
            ("client", "sends", REQUEST),
            ("worker", "gets", POST_LINE),
            ("client", "closes"),
            ("worker", "is", "closed"),
            ("phases", "are"),
        ],
        1,
        0,
    ),
    "a worker that does not respond": (
        [
            ("client", "sends", REQUEST),
            ("worker", "gets", POST_LINE),
            ("phases", "are", "wait"),
            ("clock", "moves", 5.1),
            ("client", "gets", b"HTTP/1.1 504 ", b"Route-Attempt: 1\r\n"),
            ("worker", "is", "closed"),
        ],
        1,
        1,
    ),
    "an idle client": (
        [("phases", "are", "idle"), ("clock", "moves", 7.1), ("client", "is", "closed")],
        0,
        0,
    ),
}
CONFIG = "[server.timeouts]\nresponse_head_secs = 5.0\nclient_idle_secs = 7.0\n"
CONFIG += "[routing]\nmax_total_retries = 1\n"


@pytest.fixture
def listeners(tmp_path):
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(sock) for name, sock in worker_sockets(tmp_path).items()}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_both_paths_play_the_same_transcript(listeners, name):
    steps, began, handed_over = TRANSCRIPTS[name]

    def script(world, client):
        play(world, client, *steps)

    run_fast_and_slow(listeners, script, CONFIG, began=began, handed_over=handed_over)
