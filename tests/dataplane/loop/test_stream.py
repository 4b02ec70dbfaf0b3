"""`Stream.write_soon`: its bytes are sent at the end of an iteration, in order, and never lost."""

import contextlib
import socket

import pytest
import trio
import trio.lowlevel
import trio.testing

from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import EventHandler, pause
from tests.dataplane.loop_script import Scripted, until
from tests.dataplane.manual_loop import ManualLoop, chat, read_available

ROUND = 1000


def small_buffers(stream, peer) -> None:
    stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


async def read_all(peer: socket.socket, size: int) -> bytes:
    peer.setblocking(False)
    received = b""
    with trio.fail_after(30):
        while len(received) < size:
            await trio.lowlevel.wait_readable(peer)
            piece = peer.recv(65536)
            assert piece, "closed early"
            received += piece
    return received


def test_nothing_is_sent_before_the_end_of_the_iteration():
    loop = EventLoop()
    near, peer = socket.socketpair()
    near.setblocking(False)
    peer.setblocking(False)
    with near, peer:
        stream = Stream(loop, near, None)
        stream.write_soon(b"one ")
        stream.write_soon(b"two")
        try:
            received = peer.recv(10)
        except BlockingIOError:
            received = b""
        assert received == b""
        loop.flush()
        assert (peer.recv(10), stream.pending) == (b"one two", b"")


async def test_unsent_bytes_follow_when_the_peer_reads(loop, wires):
    payload = bytes(range(256)) * ROUND
    stream, peer = wires.stream(None)
    small_buffers(stream, peer)
    stream.write_soon(payload)
    loop.flush()
    assert 0 < len(stream.pending) < len(payload)
    stream.write_soon(b"the end")
    assert await read_all(peer, len(payload) + 7) == payload + b"the end"
    await until(lambda: stream.pending == b"")


async def test_the_next_read_notices_a_closed_peer(loop, wires):
    outcomes = []

    async def script(task):
        stream = task.first[0]
        stream.write_soon(b"hello")
        task.waiting_on = stream
        await pause
        try:
            outcomes.append(stream.read(10))
        except OSError as error:
            outcomes.append(type(error))

    task = Scripted(loop, script)
    task.first = wires.stream(task)
    await trio.testing.wait_all_tasks_blocked(0.01)
    stream, peer = task.first
    peer.close()
    task.start()
    loop.flush()
    with trio.fail_after(30):
        await task.ended.wait()
    assert outcomes in ([b""], [ConnectionResetError], [BrokenPipeError])
    assert (stream.pending, stream.peer_closed) == (b"", True)


class Handler(EventHandler):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def step(self, error=None):
        self.steps += 1


@pytest.mark.parametrize("still_waits", [True, False])
def test_a_failed_send_steps_the_task_only_if_it_still_waits_for_the_stream(still_waits):
    loop, handler = EventLoop(), Handler()
    near, peer = socket.socketpair()
    near.setblocking(False)
    with near:
        stream = Stream(loop, near, handler)
        peer.close()
        handler.waiting_on = stream
        stream.write_soon(b"hello")
        loop.flush()
        assert (stream.peer_closed, handler.steps) == (True, 0)
        if not still_waits:
            handler.waiting_on = None
        loop._run_batch([])
        assert handler.steps == still_waits


async def test_closing_sends_pending_bytes(loop, wires):
    stream, peer = wires.stream(None)
    stream.write_soon(b"last words")
    stream.close()
    loop.flush()
    assert await read_all(peer, 10) == b"last words"


@pytest.fixture
def manual_loop():
    with contextlib.closing(ManualLoop("[server]\nhalf_close = 'answer'\n")) as opened:
        yield opened


def test_a_half_closed_client_gets_its_complete_response(manual_loop):
    body = bytes(12000)
    client = manual_loop.client()
    (task,) = manual_loop.dataplane.loop.tasks
    task.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.sendall(chat())
    client.shutdown(socket.SHUT_WR)
    manual_loop.run_until_idle()
    manual_loop.send_from(
        manual_loop.worker(), b"HTTP/1.1 200 OK\r\ncontent-length: 12000\r\n\r\n" + body
    )
    assert len(task.client.pending) > 0
    response, end = b"", "open"
    while end == "open":
        more, end = read_available(client)
        assert more or end == "closed"
        response += more
        manual_loop.run_until_idle()
    assert response.endswith(b"\r\n\r\n" + body)
