"""Steps of a receiver and its trainer, of two ranks on this machine."""

import sys

from omni_proxy.process_group.receiver import GroupLimits, Rendezvous
from omni_proxy.process_group.tensor_plan import parse_plans
from tests.process_group.trainer_process import sha256
from tests.process_group.wait_helpers import wait_until

# A machine with a lot to do is no stall: who waits for one makes it shorter.
LIMITS = GroupLimits(stall_secs=10.0, silent_secs=10.0, ping_secs=1.0, first_byte_secs=20.0)
# Odd sizes, an empty one and a scalar: what lies close together must still come apart.
TENSORS = [
    ("bfloat16", [3, 5], 1),
    ("uint8", [7], 2),
    ("float32", [], 3),
    ("int64", [0, 4], 4),
    ("float32", [1000, 300], 5),
]


def meeting(port, name="g", timeout_s=20.0):
    return Rendezvous("127.0.0.1", port, 1, 2, name, "gloo", timeout_s)


def joined(receiver, trainer, name="g"):
    port = trainer.tell("open", group=name, timeout=20.0)["port"]
    receiver.init(meeting(port, name))
    assert trainer.reply() == {"joined": True}
    return port


def body_of(*buckets, **more):
    def bucket(number, tensors):
        names = [f"layer.{number}.{index}" for index in range(len(tensors))]
        shapes = [shape for _, shape, _ in tensors]
        return {"names": names, "dtypes": [each[0] for each in tensors], "shapes": shapes}

    reported = [bucket(number, tensors) for number, tensors in enumerate(buckets)]
    return {"num_buckets": len(reported), "buckets": reported, **more}


def armed(receiver, *buckets, name="g", **more):
    return receiver.arm(name, parse_plans(body_of(*buckets)), ready_secs=20, **more)


def works(receiver, trainer, name="g"):
    transfer = armed(receiver, TENSORS[:2], name=name)
    sent = trainer.tell("send", group=name, tensors=TENSORS[:2])["sent"]
    received = transfer.wait(20)
    return [sha256(tensor) for tensor in received.tensors().values()] == sent


def recovers(receiver, pool):
    """Whether the next trainer passes at its first try."""
    trainer = pool.trainer()
    joined(receiver, trainer)
    assert works(receiver, trainer)
    left(receiver, trainer)
    return True


def left(receiver, trainer, name="g"):
    receiver.destroy(name)
    assert trainer.tell("destroy", group=name) == {"destroyed": True}


def moving(transfer):
    wait_until(lambda: transfer.progress().bytes_received or transfer.fault())
    assert transfer.fault() is None
    assert transfer.progress().messages_done == 0, "it was too fast for this test"


LIGHT = """
import socket, sys
from omni_proxy.process_group.fork.receiver_process import _serve
from omni_proxy.process_group.fork.forkserver import run

def babble(connection):
    connection.sendall(b"hello\\n")
    connection.recv(1 << 16)

run(socket.socket(fileno=int(sys.argv[1])), {live})
"""


def light(live="_serve"):
    """What starts a fork server without torch in it."""
    return lambda number: [sys.executable, "-c", LIGHT.format(live=live), str(number)]
