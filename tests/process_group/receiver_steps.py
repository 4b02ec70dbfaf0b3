"""Steps of a receiver and a trainer, the two ranks of a group on this machine."""

import sys

from omni_proxy.process_group.receiver import GroupLimits, Rendezvous
from omni_proxy.process_group.tensor_plan import parse_plans
from tests.process_group.trainer_process import sha256
from tests.process_group.wait_helpers import wait_until

# Long enough that a busy machine is not taken for a stall. Tests of stalls use shorter limits.
LIMITS = GroupLimits(stall_secs=10.0, silent_secs=10.0, ping_secs=1.0, first_byte_secs=20.0)
# Odd sizes, an empty tensor and a scalar, to test that adjacent tensors are kept apart.
TENSORS = [
    ("bfloat16", [3, 5], 1),
    ("uint8", [7], 2),
    ("float32", [], 3),
    ("int64", [0, 4], 4),
    ("float32", [1000, 300], 5),
]


def rendezvous(port, name="g", timeout_s=20.0):
    return Rendezvous("127.0.0.1", port, 1, 2, name, "gloo", timeout_s)


def join_group(receiver, trainer, name="g"):
    port = trainer.tell("open", group=name, timeout=20.0)["port"]
    receiver.init(rendezvous(port, name))
    assert trainer.reply() == {"joined": True}
    return port


def body_of(*buckets, **fields):
    def bucket(number, tensors):
        names = [f"layer.{number}.{index}" for index in range(len(tensors))]
        shapes = [shape for _, shape, _ in tensors]
        return {"names": names, "dtypes": [dtype for dtype, _, _ in tensors], "shapes": shapes}

    bodies = [bucket(number, tensors) for number, tensors in enumerate(buckets)]
    return {"num_buckets": len(bodies), "buckets": bodies, **fields}


def arm(receiver, *buckets, name="g", **options):
    return receiver.arm(name, parse_plans(body_of(*buckets)), ready_secs=20, **options)


def can_transfer(receiver, trainer, name="g"):
    transfer = arm(receiver, TENSORS[:2], name=name)
    sent = trainer.tell("send", group=name, tensors=TENSORS[:2])["sent"]
    received = transfer.wait(20)
    return [sha256(tensor) for tensor in received.tensors().values()] == sent


def recovers(receiver, pool):
    """Asserts that the next trainer succeeds at its first try."""
    trainer = pool.trainer()
    join_group(receiver, trainer)
    assert can_transfer(receiver, trainer)
    leave_group(receiver, trainer)
    return True


def leave_group(receiver, trainer, name="g"):
    receiver.destroy(name)
    assert trainer.tell("destroy", group=name) == {"destroyed": True}


def wait_until_bytes_move(transfer):
    wait_until(lambda: transfer.progress().bytes_received or transfer.fault())
    assert transfer.fault() is None
    assert transfer.progress().messages_done == 0, "the transfer was too fast for this test"


TORCHLESS_SERVER = """
import socket, sys
from omni_proxy.process_group.fork.receiver_process import _serve
from omni_proxy.process_group.fork.forkserver import run

def send_invalid_message(connection):
    connection.sendall(b"hello\\n")
    connection.recv(1 << 16)

run(socket.socket(fileno=int(sys.argv[1])), {serve})
"""


def torchless_server(serve="_serve"):
    """Replaces `command`: starts a fork server that does not import torch."""
    return lambda number: [sys.executable, "-c", TORCHLESS_SERVER.format(serve=serve), str(number)]
