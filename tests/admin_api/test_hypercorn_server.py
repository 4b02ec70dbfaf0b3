import json

import pytest
import trio
import trio.testing

from omni_proxy.admin_api.hypercorn_server import serve
from tests.admin_api.api_fixture import A, build_api, entry
from tests.processes import open_sockets


@pytest.fixture
async def socket_path(nursery, tmp_path):
    path = tmp_path / "admin.sock"
    await nursery.start(serve, build_api(entry(A)).app, path)
    yield path
    nursery.cancel_scope.cancel()


async def exchange(stream, request):
    """Send a request and read a response with a content-length: its head, fields and body."""
    await stream.send_all(request)
    received = b""
    while b"\r\n\r\n" not in received:
        piece = await stream.receive_some()
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += await stream.receive_some()
    return head, fields, body


async def test_the_socket_is_private_and_removed_afterwards(nursery, tmp_path):
    path = tmp_path / "admin.sock"
    path.write_text("left behind")
    scope = await nursery.start(_served, build_api(entry(A)).app, path)
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o600
    scope.cancel()
    with trio.fail_after(30):
        while path.exists():
            await trio.lowlevel.checkpoint()


async def _served(app, path, *, task_status):
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, app, path)
            task_status.started(scope)


async def test_a_connection_serves_many_requests_and_adds_no_headers(socket_path):
    stream = await trio.open_unix_socket(str(socket_path))
    async with stream:
        with trio.fail_after(30):
            for _ in range(20):
                head, fields, body = await exchange(
                    stream, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
                )
                assert head.startswith(b"HTTP/1.1 200")
                assert json.loads(body) == {"status": "alive"}
                assert not {b"server", b"date"} & set(fields)


async def test_a_head_request_gets_the_length_and_no_body(socket_path):
    async with await trio.open_unix_socket(str(socket_path)) as stream:
        await stream.send_all(b"HEAD /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = b""
        with trio.fail_after(30):
            async for piece in stream:
                received += piece
    assert b"content-length: 18\r\n" in received.lower()
    assert received.endswith(b"\r\n\r\n")


async def test_an_early_response_to_an_upload_does_not_block_the_connection(socket_path):
    # The response is sent before the body is read; the connection must serve again, or close.
    body = b"x" * 200_000
    head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with trio.fail_after(30):
        for _ in range(10):
            async with await trio.open_unix_socket(str(socket_path)) as stream:
                response_head, _, _ = await exchange(stream, head + body[:1000])
                assert response_head.startswith(b"HTTP/1.1 404")
                try:
                    await stream.send_all(body[1000:] + b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
                    rest = await stream.receive_some()
                except trio.BrokenResourceError:
                    rest = b""
                assert rest == b"" or rest.startswith(b"HTTP/1.1 200")


async def test_the_server_stops_with_idle_connections_open(nursery, tmp_path):
    path, stop = tmp_path / "admin.sock", trio.Event()
    ended = trio.Event()

    async def until_stopped(*, task_status):
        app = build_api(entry(A)).app
        await serve(app, path, stop=stop.wait, task_status=task_status)
        ended.set()

    await nursery.start(until_stopped)
    async with await trio.open_unix_socket(str(path)) as stream:
        await exchange(stream, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        stop.set()
        with trio.fail_after(30):
            await ended.wait()


async def test_a_worker_url_in_a_path_is_routed_encoded_or_not(socket_path):
    async with await trio.open_unix_socket(str(socket_path)) as stream:
        for name in (b"http%3A%2F%2F127.0.0.1%3A8011", b"http://127.0.0.1:8011"):
            request = b"GET /workers/%s HTTP/1.1\r\nhost: x\r\n\r\n" % name
            with trio.fail_after(30):
                _, _, body = await exchange(stream, request)
            assert json.loads(body)["url"] == A


async def test_a_connection_that_the_data_plane_closed_is_closed_at_once(socket_path):
    before = open_sockets()
    for _ in range(5):
        async with await trio.open_unix_socket(str(socket_path)) as stream:
            await exchange(stream, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            # Wait until the server awaits the next request.
            await trio.testing.wait_all_tasks_blocked(0.01)
    with trio.fail_after(30):
        while open_sockets() > before:  # noqa: ASYNC110  # there is no event for it
            await trio.sleep(0.01)


async def test_bytes_that_break_a_connection_do_not_end_the_server(socket_path):
    # A byte after the head of an upgrade makes Hypercorn raise (its issue 225).
    hostile = (
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\nx"
    )
    with trio.fail_after(30):
        async with await trio.open_unix_socket(str(socket_path)) as stream:
            await stream.send_all(hostile)
            while await stream.receive_some():
                pass
        async with await trio.open_unix_socket(str(socket_path)) as stream:
            head, _, _ = await exchange(stream, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
