"""How the data plane connects: over TCP, over a Unix socket, and where nobody listens."""

import errno
import gc
import socket

from omni_proxy.dataplane.loop.stream import connect
from tests.dataplane.loop_script import Scripted


def dialling(loop, address):
    """A task that dials; `outcome` is its connection or the error number."""

    async def script(task):
        try:
            task.outcome = await connect(task, address)
        except OSError as error:
            task.outcome = error.errno

    task = Scripted(loop, script)
    task.start()
    return task


async def test_connect_reaches_a_listener_over_tcp_and_over_a_unix_socket(loop, tmp_path):
    places = [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, str(tmp_path / "s"))]
    for family, place in places:
        with socket.socket(family) as listener:
            listener.bind(place)
            listener.listen()
            task = dialling(loop, listener.getsockname())
            await task.ended.wait()
            far, _ = listener.accept()
            task.outcome.send(b"hi")
            assert far.recv(9) == b"hi"
            far.close()
            task.outcome.close()
            loop.flush()


async def test_a_refused_connect_leaves_no_socket_behind(loop, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        task = dialling(loop, unused.getsockname())
        await task.ended.wait()
        assert task.outcome == errno.ECONNREFUSED
    task = dialling(loop, str(tmp_path / "nobody"))
    assert task.outcome == errno.ENOENT
    assert not any(loop._handlers)


async def test_an_address_that_is_none_leaves_no_socket_behind(loop):
    task = dialling(loop, ("/not/a/host", 9))
    assert task.outcome is not None
    del task
    gc.collect()  # a socket that is still open would be reported
    assert not any(loop._handlers)
