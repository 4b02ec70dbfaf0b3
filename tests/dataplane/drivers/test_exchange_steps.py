"""Exchanges and the counts of the data plane; requests for the admin API."""

import socket

import pytest

from omni_proxy.dataplane.upstream.pool import AdminApiPool
from tests.dataplane.manual_loop import chat, read_available
from tests.fleet.entries import NOW

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"
LONG_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 15000\r\n\r\n" + bytes(15000)
EXPECT_CONTINUE = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-length: 5\r\n"
    b"expect: 100-continue\r\n\r\n"
)


@pytest.fixture
def admin_api(tmp_path):
    """A listener in place of the admin API."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "front"))
        listener.listen()
        listener.settimeout(5)
        yield listener


def test_the_body_of_an_admin_request_is_released_after_it(manual_loop, admin_api):
    proxy = manual_loop()
    proxy.dataplane.upstream_pools.admin_api = AdminApiPool(
        proxy.dataplane.loop, admin_api.getsockname(), "front"
    )
    client = proxy.client(b"POST /nowhere HTTP/1.1\r\nhost: proxy\r\ncontent-length: 6\r\n\r\nabc")
    assert proxy.dataplane.inflight.held_bytes == 3
    proxy.send_from(client, b"def")
    near, _ = admin_api.accept()
    with near:
        assert near.recv(65536).endswith(b"\r\n\r\nabcdef")
        proxy.send_from(near, NOT_FOUND)
    assert read_available(client)[0].startswith(NOT_FOUND[:12])
    assert (proxy.phases, proxy.dataplane.inflight.held_bytes) == (["idle"], 0)
    proxy.dataplane.upstream_pools.admin_api.close()


class KeepsBodies:
    """In place of the metrics: what each exchange still has of its body when it ends."""

    def __init__(self):
        self.kept = []

    def record(self, exchange, worker):
        self.kept.append((exchange.body, exchange.requirements.body_fields))


def test_the_body_of_a_refused_request_is_released_before_the_reply(manual_loop):
    """A client may take long to read the reply."""
    proxy = manual_loop()
    proxy.dataplane.recorders.meters = meters = KeepsBodies()
    proxy.fleet.mark_dead(proxy.fleet.workers[0], NOW)
    client = proxy.client(chat(b'{"messages": [], "prompt": "kept"}'))
    assert read_available(client)[0].startswith(b"HTTP/1.1 503 ")
    assert meters.kept == [(b"", None)]


def test_a_queued_client_that_does_not_read_its_100_loses_its_slot(manual_loop):
    proxy = manual_loop("[server]\nmax_inflight = 1\nqueue_size = 1\n")
    stuck = proxy.client()
    (task,) = proxy.dataplane.loop.tasks
    task.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    proxy.send_from(stuck, chat())
    worker = proxy.worker()
    proxy.send_from(worker, LONG_RESPONSE)
    assert task.client.pending  # the client does not read
    proxy.client(chat())
    proxy.send_from(stuck, EXPECT_CONTINUE)
    assert sorted(proxy.phases) == ["queue", "wait"]
    proxy.send_from(worker, NOT_FOUND)
    assert (sorted(proxy.phases), proxy.dataplane.in_flight) == (["body", "idle"], 1)
    proxy.wait(proxy.dataplane.settings.timeouts.client_body + 1)
    assert sorted(proxy.phases) == ["idle", "refuse"]  # the client does not read the 408 either
    proxy.wait(proxy.dataplane.settings.timeouts.idle + 1)
    assert proxy.dataplane.in_flight == 0


def expecting(path):
    fields = b"host: proxy\r\ncontent-length: 5\r\nexpect: 100-continue"
    return b"POST %b HTTP/1.1\r\n%b\r\n\r\n" % (path, fields)


def test_expect_continue_for_an_unknown_path_gets_404_at_once(manual_loop):
    proxy = manual_loop()
    client = proxy.client(expecting(b"/nowhere"))
    head, _, body = read_available(client)[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert b"Not Found: POST /nowhere" in body
    assert client.recv(1) == b""


@pytest.mark.parametrize("path", [b"/workers", b"/%77orkers", b"/workers/x/drain", b"/flush_cache"])
def test_expect_continue_for_an_admin_path_gets_100(manual_loop, path):
    proxy = manual_loop()
    assert read_available(proxy.client(expecting(path)))[0] == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_the_admin_api_gets_x_omni_received_only_from_the_proxy(manual_loop, admin_api):
    proxy = manual_loop()
    proxy.dataplane.upstream_pools.admin_api = AdminApiPool(
        proxy.dataplane.loop, admin_api.getsockname(), "front"
    )
    proxy.client(
        b"GET /config HTTP/1.1\r\nhost: evil.example:1\r\n"
        b"X-Omni-Received: unix http localhost\r\nx-omni-received: tcp http localhost\r\n\r\n"
    )
    near, _ = admin_api.accept()
    with near:
        fields = near.recv(65536).lower().split(b"\r\n")
        received_via = [line for line in fields if line.startswith(b"x-omni-received")]
        assert len(received_via) == 1
        assert received_via[0].endswith(b" http evil.example:1")
    proxy.dataplane.upstream_pools.admin_api.close()
