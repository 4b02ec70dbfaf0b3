"""Idle connections that a worker has closed, and nobody has heard of that yet."""

import contextlib

import pytest

from omni_proxy.wire.response import INTERIM_HEADS
from tests.dataplane.manual_loop import ManualLoop, chat, received

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
ONE_TRY = "[routing]\nmax_total_retries = 1\n"


@pytest.fixture
def dataplane():
    made = ManualLoop(ONE_TRY)
    yield made
    made.close()


@pytest.mark.parametrize("idle", [1, 2, 5])
def test_a_request_while_idle_connections_close_gets_a_new_one(dataplane, idle):
    clients = [dataplane.client(chat()) for _ in range(idle)]
    workers = [dataplane.worker() for _ in clients]
    for worker in workers:
        worker.recv(65536)
        dataplane.tell(worker, ANSWER)
    clients[0].sendall(chat())  # the events of one turn, this one the first
    for worker in reversed(workers):  # the one that it is given first
        worker.close()
    dataplane.turn()
    dataplane.tell(dataplane.worker(), ANSWER)
    answers, _ = received(clients[0])
    assert answers.count(ANSWER[:15]) == 2
    assert [line["outcome"] for line in dataplane.log] == ["completed"] * (idle + 1)
    assert dataplane.fleet.workers[0].health.consecutive_failures == 0


INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


@pytest.mark.parametrize("count", [1, INTERIM_HEADS])
@pytest.mark.parametrize("at_once", [True, False])
def test_interim_answers_of_a_worker_are_skipped(dataplane, count, at_once):
    client = dataplane.client(chat())
    worker = dataplane.worker()
    for piece in [INTERIM * count] if at_once else [INTERIM] * count:
        dataplane.tell(worker, piece)
    dataplane.tell(worker, ANSWER)
    assert received(client)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("at_once", [1, 7, 40, 1000])
def test_a_worker_that_floods_interim_answers_is_given_up(dataplane, monkeypatch, at_once):
    client = dataplane.client(chat())
    worker = dataplane.worker()
    read = []
    of_answers = dataplane.dataplane.services.response_heads.read

    def counted(head, *, to_head):
        read.append(head)
        return of_answers(head, to_head=to_head)

    monkeypatch.setattr(dataplane.dataplane.services.response_heads, "read", counted)
    for _ in range(1 + 2 * INTERIM_HEADS // at_once):
        with contextlib.suppress(OSError):  # it was given up
            dataplane.tell(worker, INTERIM * at_once)
    output, _ = received(client)
    assert output.startswith(b"HTTP/1.1 502 ")
    assert b"interim heads" in output
    assert len(read) <= INTERIM_HEADS + at_once % INTERIM_HEADS + 1
    assert dataplane.log[-1]["status"] == 502


def test_ends_of_interim_heads_may_be_split(dataplane):
    client = dataplane.client(chat())
    worker = dataplane.worker()
    for piece in (
        INTERIM[:-1],
        b"\n" + INTERIM + INTERIM[:-3],
        INTERIM[-3:] + ANSWER[:9],
        ANSWER[9:],
    ):
        dataplane.tell(worker, piece)
    assert received(client)[0].endswith(b"{}")
