"""Pieces of an answer leave with the end of a turn; whatever comes then keeps its place behind."""

import contextlib
import socket

import pytest

from tests.door.by_hand import STREAMED, ByHand, chat, heard

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n"
EVENT = b"d\r\ndata: hello\n\n\r\n"
FAILED = b"upstream stream failed"
LARGE = b"2000\r\n" + bytes(8192) + b"\r\n"
OLD = chat().replace(b"HTTP/1.1", b"HTTP/1.0")


@pytest.fixture
def by_hand(monkeypatch):
    with contextlib.closing(ByHand(monkeypatch)) as made:
        yield made


def narrow(by_hand):
    """The client's socket takes little at a time."""
    (task,) = by_hand.door.pump.tasks
    task.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return task.client


def drained(by_hand, client):
    """All that a client hears which reads on until nothing comes."""
    came = b""
    while True:
        more, end = heard(client)
        came += more
        if not more or end != "open":
            return came, end
        by_hand.turn()


def test_streams_that_move_in_one_turn_are_sent_at_its_end(by_hand):
    clients = [by_hand.client(STREAMED) for _ in range(3)]
    workers = [by_hand.worker() for _ in clients]
    for worker in workers:
        by_hand.tell(worker, SSE + EVENT)
    for worker in workers:
        worker.sendall(EVENT)
    pump = by_hand.door.pump
    for fd, mask in pump._set.poll(1):
        pump._slots[fd].on_event(mask)
    before = [heard(client)[0] for client in clients]
    assert all(came.endswith(b"\r\n\r\n" + EVENT) for came in before)
    pump.settle()
    assert [heard(client)[0] for client in clients] == [EVENT] * 3


def test_an_error_event_stands_behind_all_that_came_before_the_fault(by_hand):
    client = by_hand.client(STREAMED)
    worker = by_hand.worker()
    by_hand.tell(worker, SSE)
    worker.sendall(EVENT)
    worker.close()
    by_hand.turn()
    came, end = heard(client)
    _, _, body = came.partition(b"\r\n\r\n")
    assert body.startswith(EVENT)
    assert FAILED in body.removeprefix(EVENT)
    assert end == "closed"


def test_no_error_event_is_put_into_what_a_client_has_not_read(by_hand):
    client = by_hand.client(STREAMED)
    worker = by_hand.worker()
    near = narrow(by_hand)
    by_hand.tell(worker, SSE + LARGE)
    assert near.late
    worker.close()
    by_hand.turn()
    came, end = drained(by_hand, client)
    _, _, body = came.partition(b"\r\n\r\n")
    assert end == "closed"
    assert (LARGE.startswith(body), len(body) < len(LARGE)) == (True, True)
    assert by_hand.log[-1]["outcome"] == "stream_error"


@pytest.mark.parametrize("asked", [OLD, STREAMED], ids=["to its close", "in chunks of ours"])
def test_an_answer_that_ends_with_its_connection_comes_whole_to_a_slow_reader(by_hand, asked):
    client = by_hand.client(asked)
    worker = by_hand.worker()
    near = narrow(by_hand)
    payload = bytes(range(256)) * 40
    by_hand.tell(worker, UNTIL_CLOSE + payload)
    assert near.late
    worker.shutdown(socket.SHUT_WR)
    by_hand.turn()
    assert by_hand.phases == ["client"]
    came, _ = drained(by_hand, client)
    _, _, body = came.partition(b"\r\n\r\n")
    if asked is STREAMED:
        assert body.endswith(b"\r\n0\r\n\r\n")
        body = body.removeprefix(b"%x\r\n" % len(payload)).removesuffix(b"\r\n0\r\n\r\n")
    assert body == payload
    assert by_hand.log[-1]["outcome"] == "completed"


def test_a_worker_is_not_read_while_its_client_does_not_read(by_hand):
    client = by_hand.client(STREAMED)
    worker = by_hand.worker()
    near = narrow(by_hand)
    by_hand.tell(worker, SSE + LARGE)
    by_hand.tell(worker, LARGE)
    assert by_hand.phases == ["client"]
    held = len(near.late)
    by_hand.tell(worker, LARGE)
    assert (len(near.late), by_hand.phases) == (held, ["client"])
    by_hand.tell(worker, b"0\r\n\r\n")
    came, _ = drained(by_hand, client)
    assert came.partition(b"\r\n\r\n")[2] == LARGE * 3 + b"0\r\n\r\n"


def test_a_client_that_stays_stuck_is_cut_at_its_own_clock(by_hand):
    client = by_hand.client(STREAMED)
    worker = by_hand.worker()
    narrow(by_hand)
    by_hand.tell(worker, SSE + LARGE)
    by_hand.tell(worker, LARGE)
    by_hand.wait(by_hand.door.limits.idle + 1)
    assert (by_hand.log[-1]["outcome"], by_hand.log[-1]["ended_by"]) == ("client_stalled", "client")
    assert drained(by_hand, client)[1] != "open"
