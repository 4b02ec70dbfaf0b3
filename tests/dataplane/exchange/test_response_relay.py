"""Pieces of an answer leave with the end of a turn; whatever comes then keeps its place behind."""

import contextlib
import socket
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataplane.manual_loop import STREAMED, ManualLoop, chat, received
from tests.example_counts import examples

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n"
EVENT = b"d\r\ndata: hello\n\n\r\n"
FAILED = b"upstream stream failed"
LARGE = b"2000\r\n" + bytes(8192) + b"\r\n"
OLD = chat().replace(b"HTTP/1.1", b"HTTP/1.0")


@pytest.fixture
def manual_loop():
    with contextlib.closing(ManualLoop()) as made:
        yield made


def narrow(manual_loop):
    """The client's socket takes little at a time."""
    (task,) = manual_loop.dataplane.loop.tasks
    task.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return task.client


def drained(manual_loop, client):
    """All that a client hears which reads on until nothing comes."""
    came = b""
    while True:
        more, end = received(client)
        came += more
        if not more or end != "open":
            return came, end
        manual_loop.turn()


def test_streams_that_move_in_one_turn_are_sent_at_its_end(manual_loop):
    clients = [manual_loop.client(STREAMED) for _ in range(3)]
    workers = [manual_loop.worker() for _ in clients]
    for worker in workers:
        manual_loop.tell(worker, SSE + EVENT)
    for worker in workers:
        worker.sendall(EVENT)
    loop = manual_loop.dataplane.loop
    for fd, mask in loop._epoll.poll(1):
        loop._handlers[fd].on_event(mask)
    before = [received(client)[0] for client in clients]
    assert all(came.endswith(b"\r\n\r\n" + EVENT) for came in before)
    loop.flush()
    assert [received(client)[0] for client in clients] == [EVENT] * 3


def test_an_error_event_follows_all_relayed_bytes(manual_loop):
    client = manual_loop.client(STREAMED)
    worker = manual_loop.worker()
    manual_loop.tell(worker, SSE)
    worker.sendall(EVENT)
    worker.close()
    manual_loop.turn()
    came, end = received(client)
    _, _, body = came.partition(b"\r\n\r\n")
    assert body.startswith(EVENT)
    assert FAILED in body.removeprefix(EVENT)
    assert end == "closed"


BREAKS = {
    "no size": b"zz\r\nnot a chunk\r\n",
    "a chunk longer than its size": b"5\r\nhelloXX\r\n",
    "bytes behind the end": b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
}


def broken_stream(manual_loop, asked, *pieces):
    """All that the client hears of a stream of these pieces, and how it ends; the body alone."""
    client = manual_loop.client(asked)
    worker = manual_loop.worker()
    manual_loop.tell(worker, SSE)
    for piece in pieces:
        manual_loop.tell(worker, piece)
    came, end = received(client)
    return came.partition(b"\r\n\r\n")[2], end


def only_chunk(body):
    size, _, rest = body.partition(b"\r\n")
    assert len(rest) == int(size, 16) + 2
    assert rest.endswith(b"\r\n")
    return rest[:-2]


@pytest.mark.parametrize("garbage", BREAKS.values(), ids=BREAKS)
@pytest.mark.parametrize("before", [(), (EVENT,), (EVENT, EVENT + EVENT)], ids=len)
def test_a_stream_that_turns_to_garbage_ends_with_an_error_event_and_a_cut(
    manual_loop, garbage, before
):
    body, end = broken_stream(manual_loop, STREAMED, *before, garbage)
    assert body.startswith(b"".join(before))
    event = only_chunk(body.removeprefix(b"".join(before)))
    assert event.startswith(b"\n\ndata: {")  # behind what may be half an event
    assert FAILED in event
    assert event.endswith(b"\n\n")
    assert end == "closed"
    assert manual_loop.log[-1]["outcome"] == "stream_error"
    assert manual_loop.fleet.workers[0].health.consecutive_failures == 1


@pytest.mark.parametrize("half", [b"d\r\ndata: he", b"d\r\ndata: hello\n\n", b"d\r", b"d"])
def test_no_error_event_is_put_into_half_a_chunk(manual_loop, half):
    body, end = broken_stream(manual_loop, STREAMED, EVENT, half, b"\0\r\r\r" + b"x" * 20)
    assert (body, end) == (EVENT + half, "closed")


@pytest.mark.parametrize("half", [b"d\r\ndata: he", b"d\r\ndata: hello\n\n"])
def test_a_client_that_gets_no_chunks_has_a_place_for_it_at_any_time(manual_loop, half):
    body, end = broken_stream(manual_loop, OLD, EVENT, half, b"\0\r\r\r" + b"x" * 20)
    reported = b"data: hello\n\n" + half[3:]
    assert body.startswith(reported + b"\n\ndata: {")
    assert FAILED in body
    assert end == "closed"


def test_no_error_event_is_put_into_an_answer_that_is_no_stream(manual_loop):
    client = manual_loop.client(chat())
    worker = manual_loop.worker()
    manual_loop.tell(worker, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    manual_loop.tell(worker, b"5\r\nhello\r\n")
    manual_loop.tell(worker, b"xyz")
    came, end = received(client)
    assert came.endswith(b"\r\n\r\n5\r\nhello\r\n")
    assert end == "closed"


CHUNKS = st.lists(st.sampled_from([b"a", b"data: x\n\n", b"data: x\r\n\r\n", b"5\r\n"]), max_size=6)


@settings(max_examples=examples(40))
@given(CHUNKS, st.lists(st.integers(0, 80), max_size=5), st.sampled_from([*BREAKS.values()]))
def test_whatever_was_relayed_is_followed_by_one_whole_chunk_or_by_nothing(payloads, cuts, garbage):
    chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in payloads]
    stream = b"".join(chunks)
    bounds = sorted({0, len(stream), *(at for at in cuts if at < len(stream))})
    pieces = [stream[a:b] for a, b in pairwise(bounds)]
    with contextlib.closing(ManualLoop()) as made:
        body, end = broken_stream(made, STREAMED, *pieces, garbage)
    assert end == "closed"
    assert body.startswith(stream)
    behind = body.removeprefix(stream)
    # What a piece means that begins within a chunk nobody can tell in all cases.
    if behind or not pieces or bounds[-2] in accumulate(map(len, chunks), initial=0):
        assert FAILED in only_chunk(behind)


def test_no_error_event_is_put_into_what_a_client_has_not_read(manual_loop):
    client = manual_loop.client(STREAMED)
    worker = manual_loop.worker()
    near = narrow(manual_loop)
    manual_loop.tell(worker, SSE + LARGE)
    assert near.pending
    worker.close()
    manual_loop.turn()
    came, end = drained(manual_loop, client)
    _, _, body = came.partition(b"\r\n\r\n")
    assert end == "closed"
    assert (LARGE.startswith(body), len(body) < len(LARGE)) == (True, True)
    assert manual_loop.log[-1]["outcome"] == "stream_error"


@pytest.mark.parametrize("asked", [OLD, STREAMED], ids=["to its close", "in chunks of ours"])
def test_a_close_delimited_response_reaches_a_slow_reader_complete(manual_loop, asked):
    client = manual_loop.client(asked)
    worker = manual_loop.worker()
    near = narrow(manual_loop)
    payload = bytes(range(256)) * 40
    manual_loop.tell(worker, UNTIL_CLOSE + payload)
    assert near.pending
    worker.shutdown(socket.SHUT_WR)
    manual_loop.turn()
    assert manual_loop.phases == ["client"]
    came, _ = drained(manual_loop, client)
    _, _, body = came.partition(b"\r\n\r\n")
    if asked is STREAMED:
        assert body.endswith(b"\r\n0\r\n\r\n")
        body = body.removeprefix(b"%x\r\n" % len(payload)).removesuffix(b"\r\n0\r\n\r\n")
    assert body == payload
    assert manual_loop.log[-1]["outcome"] == "completed"


def test_a_worker_is_not_read_while_its_client_does_not_read(manual_loop):
    client = manual_loop.client(STREAMED)
    worker = manual_loop.worker()
    near = narrow(manual_loop)
    manual_loop.tell(worker, SSE + LARGE)
    manual_loop.tell(worker, LARGE)
    assert manual_loop.phases == ["client"]
    held = len(near.pending)
    manual_loop.tell(worker, LARGE)
    assert (len(near.pending), manual_loop.phases) == (held, ["client"])
    manual_loop.tell(worker, b"0\r\n\r\n")
    came, _ = drained(manual_loop, client)
    assert came.partition(b"\r\n\r\n")[2] == LARGE * 3 + b"0\r\n\r\n"


def test_a_client_that_stays_stuck_is_cut_at_its_own_clock(manual_loop):
    client = manual_loop.client(STREAMED)
    worker = manual_loop.worker()
    narrow(manual_loop)
    manual_loop.tell(worker, SSE + LARGE)
    manual_loop.tell(worker, LARGE)
    manual_loop.wait(manual_loop.dataplane.settings.limits.idle + 1)
    assert (manual_loop.log[-1]["outcome"], manual_loop.log[-1]["ended_by"]) == (
        "client_stalled",
        "client",
    )
    assert drained(manual_loop, client)[1] != "open"


@pytest.mark.parametrize("half", [b"d\r\ndata: he", b"d\r\ndata: hello\n\n"])
@pytest.mark.parametrize("how", [b"", b"\0\r\r\r" + b"x" * 20], ids=["closes", "garbage"])
def test_no_error_event_is_put_into_half_a_chunk_behind_a_comment_of_ours(half, how):
    config = "[server]\nsse_keepalive_secs = 5\n"
    with contextlib.closing(ManualLoop(config)) as manual_loop:
        client = manual_loop.client(STREAMED)
        worker = manual_loop.worker()
        manual_loop.wait(6)
        manual_loop.tell(worker, SSE + EVENT)
        manual_loop.tell(worker, half)
        if how:
            manual_loop.tell(worker, how)
        else:
            worker.close()
            manual_loop.turn()
        came, end = received(client)
    assert came.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b": keep-alive\n\n" in came
    assert came.endswith(EVENT + half)
    assert end == "closed"
