"""Which of several real sockets accept new connections."""

import os
import resource
import socket
from contextlib import ExitStack, contextmanager

import pytest
import trio

from omni_proxy.dataplane.accept.listener import Listener, open_socket
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.multiprocess.reuseport_group import ReuseportGroup
from tests.multiprocess.limited_loop import LimitedLoop


@pytest.fixture
def port():
    loop = EventLoop()
    listener = Listener(loop, open_socket("127.0.0.1", 0), lambda sock, peer: sock.close())
    group = ReuseportGroup(loop, listener)
    yield group
    group.close_all()
    listener.close()
    loop.flush()


def distribute(port, socks, count=60):
    """How many of `count` new connections each socket got."""
    address = socks[0].getsockname()
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(address))
        return [accepted(sock) for sock in socks]


def accepted(sock):
    number = 0
    while True:
        try:
            sock.accept()[0].close()
        except BlockingIOError:
            return number
        number += 1


def test_each_slot_gets_its_share(port):
    socks = [port.listen(slot) for slot in range(3)]
    counts = distribute(port, socks, 120)
    assert sum(counts) == 120
    assert min(counts) > 10


def test_connections_are_steered_to_the_slots_that_serve(port):
    socks = [port.listen(slot) for slot in range(4)]
    for slots in ([1, 3], [0], [2], [0, 1, 2], [3]):
        port.steer(slots)
        counts = distribute(port, socks)
        assert {slot for slot, count in enumerate(counts) if count} == set(slots)
    port.steer(range(4))
    assert all(distribute(port, socks, 120))
    port.steer([])
    assert all(distribute(port, socks, 120))


def test_connections_are_steered_correctly_after_a_middle_socket_was_closed(port):
    socks = {slot: port.listen(slot) for slot in range(4)}
    port.steer([0, 2, 3])
    port.close(1)
    del socks[1]
    for slots in ([3], [2], [0, 3]):
        port.steer(slots)
        counts = dict(zip(socks, distribute(port, list(socks.values())), strict=True))
        assert {slot for slot, count in counts.items() if count} == set(slots)


def test_closing_a_socket_does_not_move_connections_of_others(port):
    socks = [port.listen(slot) for slot in range(5)]
    port.steer([2, 4])
    for closed in (1, 3):
        port.close(closed)
        assert sum(distribute(port, [socks[2], socks[4]])) == 60
    port.steer([0])
    for closed in (4, 2):
        port.close(closed)
        assert distribute(port, socks[:1]) == [60]
    assert [sock.fileno() for sock in socks[1:]] == [-1] * 4


def test_a_slot_that_is_used_again_gets_the_same_socket(port):
    socks = [port.listen(slot) for slot in range(3)]
    port.steer([2])
    port.close(1)
    assert port.listen(1) is socks[1]
    port.close(2)
    port.steer([1])
    assert distribute(port, [socks[1]]) == [60]


def test_the_backlog_of_an_exited_process_is_accepted_by_its_successor(port):
    duplicate = port.listen(1).dup()
    port.steer([1])
    with socket.create_connection(duplicate.getsockname()):
        duplicate.close()
        assert accepted(port.listen(1)) == 1


def test_other_programs_cannot_bind_the_port(port):
    port.listen(1)
    host, number = port.listener.address.split(":")
    with pytest.raises(OSError, match="in use"):
        open_socket(host, int(number))


def connect(listener):
    host, number = listener.address.split(":")
    return socket.create_connection((host, int(number)))


@contextmanager
def no_descriptors():
    """No more descriptors can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_the_main_process_pauses_and_can_always_accept_again(nursery):
    """On the same socket, without a new descriptor and without a place in the epoll set."""
    loop = LimitedLoop()
    accepted_by, accepting = trio.open_memory_channel(10)

    def listener(name):
        def on_accept(sock, peer):
            sock.close()
            accepted_by.send_nowait(name)

        return Listener(loop, open_socket("127.0.0.1", 0), on_accept)

    paused, other = listener("paused"), listener("other")
    port = ReuseportGroup(loop, paused)
    await nursery.start(loop.run)
    port.pause()
    assert port.paused
    with connect(paused), connect(other):
        assert await accepting.receive() == "other"  # the event of the first one would be earlier
        loop.full = True
        with no_descriptors():
            port.resume()
        assert not port.paused
        assert await accepting.receive() == "paused"  # the connection that arrived meanwhile
    with connect(paused):
        assert await accepting.receive() == "paused"
    port.close_all()
    for each in (paused, other):
        each.close()


def test_all_slots_share_a_unix_socket(tmp_path):
    loop = EventLoop()
    listener = Listener(loop, open_socket(f"unix:{tmp_path}/s", 0), lambda sock, peer: None)
    port = ReuseportGroup(loop, listener)
    assert port.listen(0) is port.listen(5)
    port.steer([1])
    port.close(1)
    port.close_all()
    assert (tmp_path / "s").exists()
    listener.close()
    loop.flush()
