import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from omni_proxy.process_group.broadcast.tensor_hashing import tensor_digest
from omni_proxy.process_group.receiver import CancelToken, GroupError, open_receiver
from tests.process_group.receiver_steps import (
    LIMITS,
    arm,
    can_transfer,
    join_group,
    leave_group,
    recovers,
    rendezvous,
)
from tests.process_group.trainer_process import free_port
from tests.process_group.wait_helpers import wait_until
from tests.tree import ROOT


@contextmanager
def closing_receiver(limits=LIMITS):
    receiver = open_receiver("process", limits, name="test")
    yield receiver
    receiver.close()


def test_a_group_can_be_destroyed_while_it_receives(receiver, trainer, pool):
    join_group(receiver, trainer)
    transfer = arm(receiver, [("float32", [8], 1)])
    receiver.destroy("g")
    with pytest.raises(GroupError, match="'g' was destroyed"):
        transfer.wait(20)
    with pytest.raises(GroupError, match="is not initialized"):
        arm(receiver, [("float32", [8], 1)])
    trainer.tell("destroy", group="g")
    assert recovers(receiver, pool)


def test_a_group_can_be_destroyed_during_its_rendezvous(receiver):
    with ThreadPoolExecutor(1) as threads:
        init = threads.submit(receiver.init, rendezvous(free_port()))
        wait_until(lambda: receiver.status()["groups"])
        receiver.destroy("g")
        with pytest.raises(GroupError, match="'g' was destroyed"):
            init.result(20)


def test_a_rendezvous_can_be_cancelled(receiver):
    stop = CancelToken()
    with ThreadPoolExecutor(1) as threads:
        init = threads.submit(receiver.init, rendezvous(free_port()), stop)
        wait_until(lambda: receiver.status()["groups"])
        stop.cancel("another rank refused")
        with pytest.raises(GroupError, match="another rank refused"):
            init.result(20)
    with pytest.raises(GroupError, match="another rank refused"):
        receiver.init(rendezvous(free_port()), stop)
    assert receiver.status()["groups"] == []


def test_a_cancel_after_the_rendezvous_changes_nothing(receiver, trainer):
    stop = CancelToken()
    port = trainer.tell("open", group="g")["port"]
    receiver.init(rendezvous(port), stop)
    assert trainer.reply() == {"joined": True}
    stop.cancel("too late")
    assert can_transfer(receiver, trainer)
    leave_group(receiver, trainer)


def test_a_port_that_accepts_without_answering_is_reported_in_time():
    with closing_receiver(replace(LIMITS, silent_secs=0.3)) as receiver:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(GroupError, match="no torch store answered"),
        ):
            receiver.init(rendezvous(listener.getsockname()[1]))
        assert receiver.status()["groups"] == []


def test_an_address_without_a_listener_is_reported_at_the_timeout(receiver):
    port = free_port()
    with pytest.raises(GroupError, match=f"waiting for the trainer's store at 127.0.0.1:{port}"):
        receiver.init(rendezvous(port, timeout_s=0.3))
    assert receiver.status()["groups"] == []


def test_a_group_is_replaced_only_if_its_trainer_does_not_respond(receiver, pool):
    first = pool.trainer()
    port = join_group(receiver, first)
    with pytest.raises(GroupError, match=f"'g' is ready for the trainer at 127.0.0.1:{port}"):
        receiver.init(rendezvous(free_port()))
    assert can_transfer(receiver, first)
    transfer = arm(receiver, [("float32", [8], 1)])
    # An unanswered order, so that the pool does not return this trainer again.
    first.order("send", group="g", tensors=[])
    first.process.send_signal(signal.SIGSTOP)  # its sockets stay open, but it does not respond
    second = pool.trainer()
    join_group(receiver, second)
    with pytest.raises(GroupError):
        transfer.wait(20)
    assert can_transfer(receiver, second)
    leave_group(receiver, second)
    first.kill()


def test_repeated_groups_leak_no_resources(receiver, trainer):
    def run_sync(fails):
        join_group(receiver, trainer)
        assert can_transfer(receiver, trainer)
        if fails:
            transfer = arm(receiver, [("uint8", [1 << 20], 1)])
            transfer.abort("a fault")
            del transfer
        leave_group(receiver, trainer)

    def resources():
        gc.collect()
        receiver.status()
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            # Other test processes create and remove stores of versions: these do not count.
            sum(not name.startswith(("omni-proxy-", "omni-test-")) for name in shared_memory()),
            len(receiver.status().get("processes", [])),
        )

    for fails in (True, False, False):
        run_sync(fails)
    wait_until(lambda: not receiver.status()["abandoned_threads"])
    before = resources()
    for number in range(10):
        run_sync(number == 5)
    wait_until(lambda: has_no_leak(before, resources()))


def shared_memory():
    return os.listdir("/dev/shm")


def has_no_leak(before, after):
    return all(
        count_after <= count_before + 1
        for count_before, count_after in zip(before, after, strict=True)
    )


def test_no_group_can_be_joined_after_close(isolation):
    receiver = open_receiver(isolation, LIMITS, name="closed")
    receiver.close()
    with pytest.raises(GroupError, match="shutting down"):
        receiver.init(rendezvous(free_port()))


PARENT = """
import sys
from omni_proxy.process_group.receiver import FileRegion, GroupLimits, Rendezvous, open_receiver
from omni_proxy.process_group.tensor_plan import parse_plans

receiver = open_receiver("process", GroupLimits(), name="parent")
receiver.init(Rendezvous("127.0.0.1", int(sys.argv[1]), 1, 2, "g", "gloo", 20.0))
plans = parse_plans({"names": ["w"], "dtypes": ["float32"], "shapes": [[8]]}, dense=True)
armed = receiver.arm("g", plans, ready_secs=20, into=FileRegion(sys.argv[2], (0,)), digests=True)
print("armed", flush=True)
digest = armed.wait(20).digests["w"]
print(digest, sorted({"torch", "numpy"} & sys.modules.keys()), flush=True)
print(*receiver.status()["processes"], flush=True)
sys.stdin.read()
"""


def test_a_parent_needs_no_torch_and_its_children_end_with_it(trainer, tmp_path):
    path = tmp_path / "version"
    path.write_bytes(bytes(32))
    port = trainer.tell("open", group="g")["port"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(port), str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout.readline() == "armed\n"
        assert trainer.reply() == {"joined": True}
        trainer.tell("send", group="g", tensors=[("float32", [8], 1)])
        line = parent.stdout.readline()
        expected = tensor_digest("w", "torch.float32", [8], path.read_bytes())
        assert line == f"{expected} []\n"
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2  # the fork server, and the receiver in the group
        parent.kill()
    wait_until(lambda: not [child for child in children if os.path.exists(f"/proc/{child}")])
    trainer.tell("destroy", group="g")
