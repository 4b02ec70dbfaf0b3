"""Idle connections that a worker has closed, and nobody has heard of that yet."""

import contextlib

import pytest

from omni_proxy.wire.response import INTERIM_HEADS
from tests.dataplane.manual_loop import ManualLoop, chat, read_available

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
ONE_TRY = "[routing]\nmax_total_retries = 1\n"


@pytest.fixture
def proxy():
    made = ManualLoop(ONE_TRY)
    yield made
    made.close()


@pytest.mark.parametrize("idle", [1, 2, 5])
def test_a_request_while_idle_connections_close_gets_a_new_one(proxy, idle):
    clients = [proxy.client(chat()) for _ in range(idle)]
    workers = [proxy.worker() for _ in clients]
    for worker in workers:
        worker.recv(65536)
        proxy.send_from(worker, ANSWER)
    clients[0].sendall(chat())  # the events of one turn, this one the first
    for worker in reversed(workers):  # the one that it is given first
        worker.close()
    proxy.run_until_idle()
    proxy.send_from(proxy.worker(), ANSWER)
    answers, _ = read_available(clients[0])
    assert answers.count(ANSWER[:15]) == 2
    assert [line["outcome"] for line in proxy.log] == ["completed"] * (idle + 1)
    assert proxy.fleet.workers[0].health.consecutive_failures == 0


INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


@pytest.mark.parametrize("count", [1, INTERIM_HEADS])
@pytest.mark.parametrize("at_once", [True, False])
def test_interim_answers_of_a_worker_are_skipped(proxy, count, at_once):
    client = proxy.client(chat())
    worker = proxy.worker()
    for piece in [INTERIM * count] if at_once else [INTERIM] * count:
        proxy.send_from(worker, piece)
    proxy.send_from(worker, ANSWER)
    assert read_available(client)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("at_once", [1, 7, 40, 1000])
def test_a_worker_that_floods_interim_answers_is_given_up(proxy, monkeypatch, at_once):
    client = proxy.client(chat())
    worker = proxy.worker()
    read = []
    of_answers = proxy.dataplane.services.response_heads.read

    def counted(head, *, to_head):
        read.append(head)
        return of_answers(head, to_head=to_head)

    monkeypatch.setattr(proxy.dataplane.services.response_heads, "read", counted)
    for _ in range(1 + 2 * INTERIM_HEADS // at_once):
        with contextlib.suppress(OSError):  # it was given up
            proxy.send_from(worker, INTERIM * at_once)
    output, _ = read_available(client)
    assert output.startswith(b"HTTP/1.1 502 ")
    assert b"interim heads" in output
    assert len(read) <= INTERIM_HEADS + at_once % INTERIM_HEADS + 1
    assert proxy.log[-1]["status"] == 502


def test_ends_of_interim_heads_may_be_split(proxy):
    client = proxy.client(chat())
    worker = proxy.worker()
    for piece in (
        INTERIM[:-1],
        b"\n" + INTERIM + INTERIM[:-3],
        INTERIM[-3:] + ANSWER[:9],
        ANSWER[9:],
    ):
        proxy.send_from(worker, piece)
    assert read_available(client)[0].endswith(b"{}")
