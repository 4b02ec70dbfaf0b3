"""Relayed pieces of a response are sent at the end of an iteration, and later bytes after them."""

import contextlib
import socket
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataplane.manual_loop import STREAMED, ManualLoop, chat, read_available
from tests.example_counts import examples

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n"
EVENT = b"d\r\ndata: hello\n\n\r\n"
FAILED = b"upstream stream failed"
LARGE = b"2000\r\n" + bytes(8192) + b"\r\n"
HTTP_1_0 = chat().replace(b"HTTP/1.1", b"HTTP/1.0")


@pytest.fixture
def manual_loop():
    with contextlib.closing(ManualLoop()) as opened:
        yield opened


def shrink_send_buffer(manual_loop):
    """Let the client's socket take only few bytes at a time."""
    (task,) = manual_loop.dataplane.loop.tasks
    task.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return task.client


def read_all(manual_loop, client):
    """All bytes that the client receives, and the state of its connection."""
    received = b""
    while True:
        more, end = read_available(client)
        received += more
        if not more or end != "open":
            return received, end
        manual_loop.run_until_idle()


def test_pieces_of_all_streams_are_sent_at_the_end_of_the_iteration(manual_loop):
    clients = [manual_loop.client(STREAMED) for _ in range(3)]
    workers = [manual_loop.worker() for _ in clients]
    for worker in workers:
        manual_loop.send_from(worker, SSE + EVENT)
    for worker in workers:
        worker.sendall(EVENT)
    loop = manual_loop.dataplane.loop
    for fd, mask in loop._epoll.poll(1):
        loop._handlers[fd].on_event(mask)
    before = [read_available(client)[0] for client in clients]
    assert all(received.endswith(b"\r\n\r\n" + EVENT) for received in before)
    loop.flush()
    assert [read_available(client)[0] for client in clients] == [EVENT] * 3


def test_an_error_event_follows_all_relayed_bytes(manual_loop):
    client = manual_loop.client(STREAMED)
    worker = manual_loop.worker()
    manual_loop.send_from(worker, SSE)
    worker.sendall(EVENT)
    worker.close()
    manual_loop.run_until_idle()
    received, end = read_available(client)
    _, _, body = received.partition(b"\r\n\r\n")
    assert body.startswith(EVENT)
    assert FAILED in body.removeprefix(EVENT)
    assert end == "closed"


BREAKS = {
    "no size": b"zz\r\nnot a chunk\r\n",
    "a chunk longer than its size": b"5\r\nhelloXX\r\n",
    "bytes after the end": b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
}


def relay_stream(manual_loop, request, *pieces):
    """The body that the client receives of a stream in these pieces, and the connection's state."""
    client = manual_loop.client(request)
    worker = manual_loop.worker()
    manual_loop.send_from(worker, SSE)
    for piece in pieces:
        manual_loop.send_from(worker, piece)
    received, end = read_available(client)
    return received.partition(b"\r\n\r\n")[2], end


def only_chunk(body):
    size, _, rest = body.partition(b"\r\n")
    assert len(rest) == int(size, 16) + 2
    assert rest.endswith(b"\r\n")
    return rest[:-2]


@pytest.mark.parametrize("garbage", BREAKS.values(), ids=BREAKS)
@pytest.mark.parametrize("before", [(), (EVENT,), (EVENT, EVENT + EVENT)], ids=len)
def test_a_stream_that_turns_to_garbage_ends_with_an_error_event(manual_loop, garbage, before):
    body, end = relay_stream(manual_loop, STREAMED, *before, garbage)
    assert body.startswith(b"".join(before))
    event = only_chunk(body.removeprefix(b"".join(before)))
    assert event.startswith(b"\n\ndata: {")  # the blank line ends what may be half an event
    assert FAILED in event
    assert event.endswith(b"\n\n")
    assert end == "closed"
    assert manual_loop.log[-1]["outcome"] == "stream_error"
    assert manual_loop.fleet.workers[0].health.consecutive_failures == 1


@pytest.mark.parametrize("half", [b"d\r\ndata: he", b"d\r\ndata: hello\n\n", b"d\r", b"d"])
def test_no_error_event_is_sent_within_a_chunk(manual_loop, half):
    body, end = relay_stream(manual_loop, STREAMED, EVENT, half, b"\0\r\r\r" + b"x" * 20)
    assert (body, end) == (EVENT + half, "closed")


@pytest.mark.parametrize("half", [b"d\r\ndata: he", b"d\r\ndata: hello\n\n"])
def test_an_http_1_0_client_always_gets_the_error_event(manual_loop, half):
    body, end = relay_stream(manual_loop, HTTP_1_0, EVENT, half, b"\0\r\r\r" + b"x" * 20)
    relayed = b"data: hello\n\n" + half[3:]
    assert body.startswith(relayed + b"\n\ndata: {")
    assert FAILED in body
    assert end == "closed"


def test_no_error_event_is_sent_in_a_response_that_is_no_stream(manual_loop):
    client = manual_loop.client(chat())
    worker = manual_loop.worker()
    manual_loop.send_from(worker, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    manual_loop.send_from(worker, b"5\r\nhello\r\n")
    manual_loop.send_from(worker, b"xyz")
    received, end = read_available(client)
    assert received.endswith(b"\r\n\r\n5\r\nhello\r\n")
    assert end == "closed"


CHUNKS = st.lists(st.sampled_from([b"a", b"data: x\n\n", b"data: x\r\n\r\n", b"5\r\n"]), max_size=6)


@settings(max_examples=examples(40))
@given(CHUNKS, st.lists(st.integers(0, 80), max_size=5), st.sampled_from([*BREAKS.values()]))
def test_relayed_bytes_are_followed_by_one_complete_chunk_or_nothing(payloads, cuts, garbage):
    chunks = [b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads]
    stream = b"".join(chunks)
    bounds = sorted({0, len(stream), *(at for at in cuts if at < len(stream))})
    pieces = [stream[a:b] for a, b in pairwise(bounds)]
    with contextlib.closing(ManualLoop()) as manual_loop:
        body, end = relay_stream(manual_loop, STREAMED, *pieces, garbage)
    assert end == "closed"
    assert body.startswith(stream)
    rest = body.removeprefix(stream)
    # Of a piece that begins within a chunk it is not always known whether it ends between chunks.
    if rest or not pieces or bounds[-2] in accumulate(map(len, chunks), initial=0):
        assert FAILED in only_chunk(rest)


def test_no_error_event_is_sent_while_bytes_are_unsent(manual_loop):
    client = manual_loop.client(STREAMED)
    worker = manual_loop.worker()
    near = shrink_send_buffer(manual_loop)
    manual_loop.send_from(worker, SSE + LARGE)
    assert near.pending
    worker.close()
    manual_loop.run_until_idle()
    received, end = read_all(manual_loop, client)
    _, _, body = received.partition(b"\r\n\r\n")
    assert end == "closed"
    assert (LARGE.startswith(body), len(body) < len(LARGE)) == (True, True)
    assert manual_loop.log[-1]["outcome"] == "stream_error"


@pytest.mark.parametrize("request_bytes", [HTTP_1_0, STREAMED], ids=["to its close", "in chunks"])
def test_a_close_delimited_response_reaches_a_slow_reader_complete(manual_loop, request_bytes):
    client = manual_loop.client(request_bytes)
    worker = manual_loop.worker()
    near = shrink_send_buffer(manual_loop)
    payload = bytes(range(256)) * 40
    manual_loop.send_from(worker, UNTIL_CLOSE + payload)
    assert near.pending
    worker.shutdown(socket.SHUT_WR)
    manual_loop.run_until_idle()
    assert manual_loop.phases == ["client"]
    received, _ = read_all(manual_loop, client)
    _, _, body = received.partition(b"\r\n\r\n")
    if request_bytes is STREAMED:
        assert body.endswith(b"\r\n0\r\n\r\n")
        body = body.removeprefix(b"%x\r\n" % len(payload)).removesuffix(b"\r\n0\r\n\r\n")
    assert body == payload
    assert manual_loop.log[-1]["outcome"] == "completed"


def test_a_worker_is_not_read_while_its_client_does_not_read(manual_loop):
    client = manual_loop.client(STREAMED)
    worker = manual_loop.worker()
    near = shrink_send_buffer(manual_loop)
    manual_loop.send_from(worker, SSE + LARGE)
    manual_loop.send_from(worker, LARGE)
    assert manual_loop.phases == ["client"]
    held = len(near.pending)
    manual_loop.send_from(worker, LARGE)
    assert (len(near.pending), manual_loop.phases) == (held, ["client"])
    manual_loop.send_from(worker, b"0\r\n\r\n")
    received, _ = read_all(manual_loop, client)
    assert received.partition(b"\r\n\r\n")[2] == LARGE * 3 + b"0\r\n\r\n"


def test_a_client_that_does_not_read_is_closed_after_idle_secs(manual_loop):
    client = manual_loop.client(STREAMED)
    worker = manual_loop.worker()
    shrink_send_buffer(manual_loop)
    manual_loop.send_from(worker, SSE + LARGE)
    manual_loop.send_from(worker, LARGE)
    manual_loop.wait(manual_loop.dataplane.settings.timeouts.idle + 1)
    assert (manual_loop.log[-1]["outcome"], manual_loop.log[-1]["ended_by"]) == (
        "client_stalled",
        "client",
    )
    assert read_all(manual_loop, client)[1] != "open"


@pytest.mark.parametrize("half", [b"d\r\ndata: he", b"d\r\ndata: hello\n\n"])
@pytest.mark.parametrize("garbage", [b"", b"\0\r\r\r" + b"x" * 20], ids=["closes", "garbage"])
def test_no_error_event_is_sent_within_a_chunk_after_a_keep_alive_comment(half, garbage):
    config = "[server]\nsse_keepalive_secs = 5\n"
    with contextlib.closing(ManualLoop(config)) as manual_loop:
        client = manual_loop.client(STREAMED)
        worker = manual_loop.worker()
        manual_loop.wait(6)
        manual_loop.send_from(worker, SSE + EVENT)
        manual_loop.send_from(worker, half)
        if garbage:
            manual_loop.send_from(worker, garbage)
        else:
            worker.close()
            manual_loop.run_until_idle()
        received, end = read_available(client)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b": keep-alive\n\n" in received
    assert received.endswith(EVENT + half)
    assert end == "closed"
