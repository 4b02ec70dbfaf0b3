"""Attempts on idle connections that the worker has just closed, and interim responses."""

import contextlib

import pytest

from omni_proxy.wire.response import INTERIM_HEADS
from tests.dataplane.manual_loop import ManualLoop, chat, read_available

RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
ONE_TRY = "[routing]\nmax_total_retries = 1\n"


@pytest.fixture
def proxy():
    manual_loop = ManualLoop(ONE_TRY)
    yield manual_loop
    manual_loop.close()


@pytest.mark.parametrize("idle", [1, 2, 5])
def test_a_request_gets_a_new_connection_if_all_idle_ones_close(proxy, idle):
    clients = [proxy.client(chat()) for _ in range(idle)]
    workers = [proxy.worker() for _ in clients]
    for worker in workers:
        worker.recv(65536)
        proxy.send_from(worker, RESPONSE)
    clients[0].sendall(chat())  # all in one iteration, this event first
    for worker in reversed(workers):  # the pool reuses the last one first
        worker.close()
    proxy.run_until_idle()
    proxy.send_from(proxy.worker(), RESPONSE)
    responses, _ = read_available(clients[0])
    assert responses.count(RESPONSE[:15]) == 2
    assert [line["outcome"] for line in proxy.log] == ["completed"] * (idle + 1)
    assert proxy.fleet.workers[0].health.consecutive_failures == 0


INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


@pytest.mark.parametrize("count", [1, INTERIM_HEADS])
@pytest.mark.parametrize("at_once", [True, False])
def test_interim_responses_are_skipped(proxy, count, at_once):
    client = proxy.client(chat())
    worker = proxy.worker()
    for piece in [INTERIM * count] if at_once else [INTERIM] * count:
        proxy.send_from(worker, piece)
    proxy.send_from(worker, RESPONSE)
    assert read_available(client)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("at_once", [1, 7, 40, 1000])
def test_too_many_interim_responses_fail_the_attempt(proxy, monkeypatch, at_once):
    client = proxy.client(chat())
    worker = proxy.worker()
    parsed_heads = []
    read_head = proxy.dataplane.services.response_heads.read

    def record_and_read(head, *, to_head):
        parsed_heads.append(head)
        return read_head(head, to_head=to_head)

    monkeypatch.setattr(proxy.dataplane.services.response_heads, "read", record_and_read)
    for _ in range(1 + 2 * INTERIM_HEADS // at_once):
        with contextlib.suppress(OSError):  # the proxy may have closed it
            proxy.send_from(worker, INTERIM * at_once)
    response, _ = read_available(client)
    assert response.startswith(b"HTTP/1.1 502 ")
    assert b"interim heads" in response
    assert len(parsed_heads) <= INTERIM_HEADS + at_once % INTERIM_HEADS + 1
    assert proxy.log[-1]["status"] == 502


def test_interim_heads_may_arrive_in_pieces(proxy):
    client = proxy.client(chat())
    worker = proxy.worker()
    for piece in (
        INTERIM[:-1],
        b"\n" + INTERIM + INTERIM[:-3],
        INTERIM[-3:] + RESPONSE[:9],
        RESPONSE[9:],
    ):
        proxy.send_from(worker, piece)
    assert read_available(client)[0].endswith(b"{}")
