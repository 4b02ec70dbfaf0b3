"""Idle connections that a worker has closed, and nobody has heard of that yet."""

import pytest

from tests.door.by_hand import ByHand, chat, heard

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
ONE_TRY = "[routing]\nmax_total_retries = 1\n"


@pytest.fixture
def door(monkeypatch):
    made = ByHand(monkeypatch, ONE_TRY)
    yield made
    made.close()


@pytest.mark.parametrize("idle", [1, 2, 5])
def test_a_request_that_comes_when_a_worker_closes_them_all_gets_a_new_one(door, idle):
    clients = [door.client(chat()) for _ in range(idle)]
    workers = [door.worker() for _ in clients]
    for worker in workers:
        worker.recv(65536)
        door.tell(worker, ANSWER)
    clients[0].sendall(chat())  # the events of one turn, this one the first
    for worker in reversed(workers):  # the one that it is given first
        worker.close()
    door.turn()
    door.tell(door.worker(), ANSWER)
    answers, _ = heard(clients[0])
    assert answers.count(ANSWER[:15]) == 2
    assert [line["outcome"] for line in door.log] == ["completed"] * (idle + 1)
    assert door.fleet.workers[0].machine.consecutive_failures == 0
