"""Connecting over TCP, over a Unix socket, and to addresses where no program listens."""

import errno
import gc
import socket

from omni_proxy.dataplane.loop.stream import connect
from tests.dataplane.loop_script import Scripted


def start_connecting(loop, address):
    """A task that connects; `outcome` is its stream or the error number."""

    async def script(task):
        try:
            task.outcome = await connect(task, address)
        except OSError as error:
            task.outcome = error.errno

    task = Scripted(loop, script)
    task.start()
    return task


async def test_connect_reaches_a_listener_over_tcp_and_over_a_unix_socket(loop, tmp_path):
    addresses = [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, str(tmp_path / "s"))]
    for family, address in addresses:
        with socket.socket(family) as listener:
            listener.bind(address)
            listener.listen()
            task = start_connecting(loop, listener.getsockname())
            await task.ended.wait()
            peer, _ = listener.accept()
            task.outcome.send(b"hi")
            assert peer.recv(9) == b"hi"
            peer.close()
            task.outcome.close()
            loop.flush()


async def test_a_refused_connect_leaves_no_socket_behind(loop, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        task = start_connecting(loop, unused.getsockname())
        await task.ended.wait()
        assert task.outcome == errno.ECONNREFUSED
    task = start_connecting(loop, str(tmp_path / "missing"))
    assert task.outcome == errno.ENOENT
    assert not any(loop._handlers)


async def test_an_invalid_address_leaves_no_socket_behind(loop):
    task = start_connecting(loop, ("/not/a/host", 9))
    assert task.outcome is not None
    del task
    gc.collect()  # an open socket would cause a ResourceWarning
    assert not any(loop._handlers)
