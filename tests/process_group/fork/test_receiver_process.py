"""The receiver process and the descriptors that are passed with commands."""

import os
import resource
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_proxy.process_group.fork.child_process import ChildHandle
from omni_proxy.process_group.fork.forkserver_client import SHARED_FORK_SERVER
from omni_proxy.process_group.fork.ipc import LOST, Arm, Configure, JsonSocket, Send
from omni_proxy.process_group.fork.receiver_process import PassedDescriptor
from omni_proxy.process_group.tensor_plan import make_plan

PLANS = (make_plan([("w", "uint8", [8])], dense=True),)


@pytest.fixture
def child():
    child = ChildHandle(Configure(5.0, 10.0, 1.0, None, 60.0, 30), "child", SHARED_FORK_SERVER)
    child.require_ready(60)
    yield child
    child.kill("the test is over")
    assert child.wait_reaped(20)


@pytest.fixture
def channels():
    parent, child = map(JsonSocket, socket.socketpair())
    yield parent, child
    parent.close()
    child.close()


@pytest.mark.parametrize(
    "command",
    [Arm(1, "no such group", PLANS, 1.0, digests=False, block=3), Send(1, PLANS, block=3)],
    ids=["arm", "send"],
)
def test_a_refused_command_leaves_no_descriptor_open(child, command):
    before = descriptors_of(child.pid)
    descriptor = os.memfd_create("test-child")
    assert child.call(command, 30, descriptor).error
    os.close(descriptor)
    assert descriptors_of(child.pid) == before


def descriptors_of(pid):
    folder = f"/proc/{pid}/fd"
    return sorted(os.readlink(f"{folder}/{number}") for number in os.listdir(folder))


def test_a_lost_descriptor_is_reported_and_keeps_its_position(channels):
    parent, child = channels
    lines = child.lines()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    read, write = os.pipe()
    try:
        # No descriptor is left for the child.
        resource.setrlimit(resource.RLIMIT_NOFILE, (write, limits[1]))
        parent.send(Send(1, PLANS, block=3), read)
        next(lines)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    parent.send(Send(2, PLANS, block=4), read)
    next(lines)
    lost, passed = child.descriptors
    assert lost == LOST
    assert os.fstat(passed).st_ino == os.fstat(read).st_ino
    with pytest.raises(OSError, match="too many open files"):
        PassedDescriptor(lost).take()
    PassedDescriptor(lost).close()
    for descriptor in (read, write):
        os.close(descriptor)


def test_a_descriptor_is_closed_or_taken_exactly_once():
    def race(act):
        try:
            return act()
        except OSError:
            return None

    with ThreadPoolExecutor(2) as pool:
        for _ in range(200):
            read, write = os.pipe()
            passed = PassedDescriptor(write)
            taken, _ = pool.map(race, (passed.take, passed.close))
            if taken is not None:
                os.close(taken)
            assert os.read(read, 1) == b""  # the write end is closed everywhere
            os.close(read)
    with pytest.raises(OSError, match="has ended"):
        passed.take()
