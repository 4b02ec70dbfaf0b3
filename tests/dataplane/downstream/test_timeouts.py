import contextlib
import socket

import pytest

from tests.dataplane.manual_loop import STREAMED, chat, read_available

JUST_BEFORE, JUST_AFTER = -0.01, 0.02
ONE_TRY = "[routing]\nmax_total_retries = 1\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"b\r\ndata: one\n\n\r\n"


def timeouts(**secs):
    return "[server.timeouts]\n" + "".join(f"{key} = {value}\n" for key, value in secs.items())


def assert_expires(proxy, phase, secs):
    """The timeout of the current phase expires after `secs`, not earlier."""
    proxy.wait(secs + JUST_BEFORE)
    assert proxy.phases == [phase]
    proxy.wait(JUST_AFTER)
    assert proxy.phases != [phase]


def assert_local_reply(client, status, code):
    response, _ = read_available(client)
    assert response.startswith(b"HTTP/1.1 %d " % status)
    assert b'"code":"%b"' % code.encode() in response


def test_client_idle_secs_ends_with_a_close_without_a_response(manual_loop):
    proxy = manual_loop(timeouts(client_idle_secs=75))
    client = proxy.client()
    assert_expires(proxy, "idle", 75)
    assert read_available(client) == (b"", "closed")
    assert proxy.log == []


def test_client_head_secs_counts_from_the_first_byte_and_ends_with_408(manual_loop):
    proxy = manual_loop(timeouts(client_head_secs=10, client_idle_secs=75))
    client = proxy.client()
    proxy.wait(70)
    proxy.send_from(client, b"POST / HT")
    proxy.wait(9)
    proxy.send_from(client, b"TP/1.1\r\n")  # further bytes do not extend the timeout
    assert_expires(proxy, "head", 1)
    assert_local_reply(client, 408, "head_timeout")
    assert proxy.phases == ["linger"]
    proxy.wait(2.1)
    assert proxy.phases == []
    assert proxy.log[0]["phase"] == "head"


def test_client_body_secs_counts_from_the_last_bytes_and_ends_with_408(manual_loop):
    proxy = manual_loop(timeouts(client_body_secs=60))
    client = proxy.client(chat(bytes(20000))[:300])
    proxy.wait(59)
    proxy.send_from(client, bytes(100))
    assert_expires(proxy, "body", 60)
    assert_local_reply(client, 408, "body_timeout")
    assert proxy.log == []  # the proxy still discards input for a moment
    client.close()
    proxy.run_until_idle()
    assert (proxy.log[0]["ended_by"], proxy.log[0]["status"]) == ("client", 408)


def test_connect_secs_ends_with_502(manual_loop):
    proxy = manual_loop(timeouts(connect_secs=5) + ONE_TRY)
    proxy.listener.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:  # a full backlog accepts no connection
        filler.setblocking(False)
        filler.connect_ex(proxy.listener.getsockname())
    client = proxy.client(chat())
    assert_expires(proxy, "dial", 5)
    assert_local_reply(client, 502, "connect_failure")
    for filler in fillers:
        filler.close()


def test_response_head_secs_ends_with_504(manual_loop):
    proxy = manual_loop(timeouts(response_head_secs=600))
    client = proxy.client(chat())
    proxy.worker()
    assert_expires(proxy, "wait", 600)
    assert_local_reply(client, 504, "response_timeout")
    assert proxy.phases == ["idle"]  # the connection stays open


def test_response_head_secs_does_not_expire_while_the_worker_reads_the_request(manual_loop):
    proxy = manual_loop(timeouts(response_head_secs=600))
    proxy.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unsent = chat(b'{"messages": []}' + b" " * (16 << 20))
    client = proxy.client()
    client.setblocking(False)
    loop = proxy.dataplane.loop
    while unsent:
        with contextlib.suppress(BlockingIOError):
            unsent = unsent[client.send(unsent) :]
        loop._run_batch(loop._epoll.poll(0))
    proxy.run_until_idle()  # a large body is parsed in slices
    worker = proxy.worker()
    for _ in range(3):
        proxy.wait(590)
        assert proxy.phases == ["send"]
        received = 0
        while received < 2 << 20:
            received += len(worker.recv(65536))
            loop._run_batch(loop._epoll.poll(0))
    proxy.run_until_idle()
    proxy.wait(600 + JUST_AFTER)
    assert_local_reply(client, 504, "response_timeout")


def test_first_byte_secs_ends_abnormally_with_an_error_event(manual_loop):
    proxy = manual_loop(timeouts(first_byte_secs=30, idle_secs=300))
    client = proxy.client(STREAMED)
    proxy.send_from(proxy.worker(), SSE)
    assert_expires(proxy, "first", 30)
    response, end = read_available(client)
    assert (b'"reason":"stream_broken"' in response, end) == (True, "closed")
    assert not response.endswith(b"0\r\n\r\n")
    assert (proxy.log[0]["outcome"], proxy.log[0]["phase"]) == ("stream_error", "first")


@pytest.mark.parametrize("sent", [b"", EVENT], ids=["before the first byte", "between two pieces"])
def test_idle_secs_ends_abnormally_with_an_error_event(manual_loop, sent):
    proxy = manual_loop(timeouts(idle_secs=300))
    client = proxy.client(STREAMED)
    worker = proxy.worker()
    proxy.send_from(worker, SSE)
    if sent:
        proxy.wait(299)
        proxy.send_from(worker, sent)
    assert_expires(proxy, "relay" if sent else "first", 300)
    response, end = read_available(client)
    assert (b'"reason":"stream_broken"' in response, end) == (True, "closed")
    assert proxy.fleet.workers[0].health.consecutive_failures == 1


def test_idle_secs_ends_a_client_that_does_not_read(manual_loop):
    proxy = manual_loop(timeouts(idle_secs=300))
    proxy.client(chat())
    worker = proxy.worker()
    worker.settimeout(0.05)
    worker.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n")
    with contextlib.suppress(TimeoutError):
        for _ in range(2000):
            proxy.send_from(worker, bytes(65536))
    assert_expires(proxy, "client", 300)
    assert (proxy.log[0]["outcome"], proxy.log[0]["ended_by"]) == (
        "client_stalled",
        "client",
    )
    assert proxy.fleet.workers[0].health.consecutive_failures == 0


def test_queue_timeout_secs_ends_with_503(manual_loop):
    proxy = manual_loop("[server]\nmax_inflight = 1\nqueue_size = 1\nqueue_timeout_secs = 30\n")
    proxy.client(chat())
    client = proxy.client(chat())
    proxy.wait(30 + JUST_BEFORE)
    assert sorted(proxy.phases) == ["queue", "wait"]
    proxy.wait(JUST_AFTER)
    response, _ = read_available(client)
    assert response.startswith(b"HTTP/1.1 503 ")
    assert b"queue_timeout" in response


def test_request_timeout_secs_ends_with_504_before_the_response(manual_loop):
    proxy = manual_loop("[server]\nrequest_timeout_secs = 1800\n" + timeouts(response_head_secs=0))
    client = proxy.client(chat())
    proxy.worker()
    assert_expires(proxy, "wait", 1800)
    assert_local_reply(client, 504, "response_timeout")


def test_request_timeout_secs_applies_in_the_queue(manual_loop):
    config = "[server]\nqueue_size = 1\nqueue_timeout_secs = 0\nrequest_timeout_secs = 5\n"
    proxy = manual_loop(config)
    proxy.fleet.workers[0].disabled = True
    client = proxy.client(chat())
    assert_expires(proxy, "queue", 5)
    assert_local_reply(client, 504, "timeout")
    proxy.wait(2.1)
    assert proxy.log[0]["ended_by"] == "proxy"


def test_request_timeout_secs_ends_a_response_that_has_begun(manual_loop):
    proxy = manual_loop("[server]\nrequest_timeout_secs = 1800\n" + timeouts(idle_secs=300))
    client = proxy.client(chat())
    worker = proxy.worker()
    proxy.send_from(worker, b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n")
    for _ in range(6):
        proxy.wait(290)
        proxy.send_from(worker, b"more")
    assert_expires(proxy, "relay", 60)
    response, end = read_available(client)
    assert (response.count(b"more"), end) == (6, "closed")
    assert proxy.log[0]["outcome"] == "timed_out"
    assert proxy.fleet.workers[0].health.consecutive_failures == 0


def test_request_timeout_secs_does_not_apply_to_streams(manual_loop):
    proxy = manual_loop("[server]\nrequest_timeout_secs = 10\n" + timeouts(response_head_secs=100))
    proxy.client(STREAMED)
    proxy.worker()
    assert_expires(proxy, "wait", 100)


def test_sse_keepalive_secs_sends_comments(manual_loop):
    proxy = manual_loop("[server]\nsse_keepalive_secs = 15\n" + timeouts(response_head_secs=40))
    client = proxy.client(STREAMED)
    worker = proxy.worker()
    for _ in range(2):
        proxy.wait(15 + JUST_AFTER)
        assert read_available(client)[0].endswith(b": keep-alive\n\n\r\n")
    proxy.send_from(worker, SSE + EVENT + b"0\r\n\r\n")
    assert read_available(client) == (EVENT + b"0\r\n\r\n", "open")


def test_a_client_that_does_not_read_local_replies_is_closed_after_idle_secs(manual_loop):
    proxy = manual_loop(timeouts(idle_secs=300))
    client = proxy.client()
    task = next(iter(proxy.dataplane.loop.tasks))
    task.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    proxy.send_from(client, b"GET /v1/completions HTTP/1.1\r\nhost: a\r\n\r\n" * 200)
    assert_expires(proxy, "refuse", 300)
    assert proxy.phases == []


@pytest.mark.parametrize(
    ("key", "sent", "phase"),
    [
        ("client_idle_secs", b"", "idle"),
        ("client_head_secs", b"POST", "head"),
        ("client_body_secs", chat(bytes(20000))[:300], "body"),
        ("response_head_secs", chat(), "wait"),
    ],
)
def test_0_disables_a_timeout(manual_loop, key, sent, phase):
    proxy = manual_loop(timeouts(**{key: 0}) + "[server]\nrequest_timeout_secs = 0\n")
    proxy.client(sent)
    proxy.wait(10**7)
    assert proxy.phases == [phase]


def test_a_client_that_does_not_read_keep_alives_is_closed_after_idle_secs(manual_loop):
    proxy = manual_loop("[server]\nsse_keepalive_secs = 1\n" + timeouts(idle_secs=300))
    client = proxy.client()
    (task,) = proxy.dataplane.loop.tasks
    task.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    proxy.send_from(client, STREAMED)
    proxy.worker()
    waits = 0
    while task.waiting_on is not task.client:  # until its buffer is full
        proxy.wait(1 + JUST_AFTER)
        waits += 1
        assert waits < 100
    assert_expires(proxy, "wait", 300)
    assert (proxy.phases, proxy.log[-1]["outcome"]) == ([], "client_stalled")
    assert proxy.log[-1]["ended_by"] == "client"
