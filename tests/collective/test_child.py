"""What the receiving process does with a descriptor that came beside an order it refuses."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from omni_proxy.collective.child import Handed, _Told, _Work
from omni_proxy.collective.group import Limits
from omni_proxy.collective.specs import plan_of
from omni_proxy.collective.wires import Arm, Send, Up, Wire

PLANS = (plan_of([("w", "uint8", [8])], dense=True),)


@pytest.fixture
def wires():
    ours, theirs = map(Wire, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "order",
    [Arm(1, "no such group", PLANS, 1.0, digests=False, block=3), Send(1, PLANS, block=3)],
    ids=["arm", "send"],
)
def test_an_order_that_is_refused_keeps_no_descriptor(wires, order):
    parent, child = wires
    work = _Work(child, _Told(child), Limits(5.0, 10.0, 1.0))
    descriptor = os.memfd_create("test-child")
    child.descriptors.append(descriptor)
    work.take(order)
    answer = msgspec.json.Decoder(Up).decode(next(parent.lines()))
    assert answer.error
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_descriptor_is_closed_or_taken_once_whoever_is_first():
    def race(act):
        try:
            return act()
        except OSError:
            return None

    with ThreadPoolExecutor(2) as pool:
        for _ in range(200):
            read, write = os.pipe()
            handed = Handed(write)
            taken, _ = pool.map(race, (handed.take, handed.close))
            if taken is not None:
                os.close(taken)
            assert os.read(read, 1) == b""  # nobody has the other end any more
            os.close(read)
    with pytest.raises(OSError, match="is over"):
        handed.take()
