"""What an exchange leaves behind in the counts of its data plane."""

import socket

import pytest

from omni_proxy.dataplane.upstream.pool import AdminApiPool
from tests.dataplane.manual_loop import chat, received

ANSWER = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"
LONG = b"HTTP/1.1 200 OK\r\ncontent-length: 15000\r\n\r\n" + bytes(15000)
EXPECTING = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-length: 5\r\n"
    b"expect: 100-continue\r\n\r\n"
)


@pytest.fixture
def front(tmp_path):
    """Where the control routes are answered."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "front"))
        listener.listen()
        listener.settimeout(5)
        yield listener


def test_a_body_for_the_control_routes_is_held_no_longer_than_its_request(manual_loop, front):
    dataplane = manual_loop()
    dataplane.dataplane.pools.admin_api = AdminApiPool(
        dataplane.dataplane.loop, front.getsockname(), "front"
    )
    client = dataplane.client(
        b"POST /nowhere HTTP/1.1\r\nhost: proxy\r\ncontent-length: 6\r\n\r\nabc"
    )
    assert dataplane.dataplane.inflight.held_bytes == 3
    dataplane.tell(client, b"def")
    near, _ = front.accept()
    with near:
        assert near.recv(65536).endswith(b"\r\n\r\nabcdef")
        dataplane.tell(near, ANSWER)
    assert received(client)[0].startswith(ANSWER[:12])
    assert (dataplane.phases, dataplane.dataplane.inflight.held_bytes) == (["idle"], 0)
    dataplane.dataplane.pools.admin_api.close()


def test_a_client_that_waited_for_its_turn_and_takes_no_100_does_not_keep_it(manual_loop):
    dataplane = manual_loop("[server]\nmax_inflight = 1\nqueue_size = 1\n")
    stuck = dataplane.client()
    (task,) = dataplane.dataplane.loop.tasks
    task.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    dataplane.tell(stuck, chat())
    worker = dataplane.worker()
    dataplane.tell(worker, LONG)
    assert task.client.pending  # which it does not read either
    dataplane.client(chat())
    dataplane.tell(stuck, EXPECTING)
    assert sorted(dataplane.phases) == ["queue", "wait"]
    dataplane.tell(worker, ANSWER)
    assert (sorted(dataplane.phases), dataplane.dataplane.in_flight) == (["body", "idle"], 1)
    dataplane.wait(dataplane.dataplane.settings.limits.client_body + 1)
    assert sorted(dataplane.phases) == ["idle", "refuse"]  # it takes no 408 either
    dataplane.wait(dataplane.dataplane.settings.limits.idle + 1)
    assert dataplane.dataplane.in_flight == 0


def asking(path):
    fields = b"host: proxy\r\ncontent-length: 5\r\nexpect: 100-continue"
    return b"POST %b HTTP/1.1\r\n%b\r\n\r\n" % (path, fields)


def test_expect_continue_for_an_unknown_path_gets_404_at_once(manual_loop):
    dataplane = manual_loop()
    client = dataplane.client(asking(b"/nowhere"))
    head, _, body = received(client)[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert b"Not Found: POST /nowhere" in body
    assert client.recv(1) == b""


@pytest.mark.parametrize("path", [b"/workers", b"/%77orkers", b"/workers/x/drain", b"/flush_cache"])
def test_for_a_path_of_the_control_routes_he_may_go_on(manual_loop, path):
    dataplane = manual_loop()
    assert received(dataplane.client(asking(path)))[0] == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_admin_routes_get_the_listener_from_the_proxy_only(manual_loop, front):
    dataplane = manual_loop()
    dataplane.dataplane.pools.admin_api = AdminApiPool(
        dataplane.dataplane.loop, front.getsockname(), "front"
    )
    dataplane.client(
        b"GET /config HTTP/1.1\r\nhost: evil.example:1\r\n"
        b"X-Omni-Received: unix http localhost\r\nx-omni-received: tcp http localhost\r\n\r\n"
    )
    near, _ = front.accept()
    with near:
        fields = near.recv(65536).lower().split(b"\r\n")
        reported = [line for line in fields if line.startswith(b"x-omni-received")]
        assert len(reported) == 1
        assert reported[0].endswith(b" http evil.example:1")
    dataplane.dataplane.pools.admin_api.close()
