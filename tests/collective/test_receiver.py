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
import torch

from omni_proxy.collective import in_process
from omni_proxy.collective.receiver import (
    GroupError,
    Limits,
    Place,
    Rendezvous,
    Stop,
    open_receiver,
)
from omni_proxy.collective.specs import plans_of
from omni_proxy.weights.checksum import tensor_digest
from tests.collective.trainer_side import Pool, Trainer, free_port, sha256
from tests.tree import ROOT

BIG_BYTES = 384 << 20
LIMITS = Limits(stall_secs=1.0, silent_secs=10.0, ping_secs=1.0, first_byte_secs=20.0)
# Odd sizes, an empty one and a scalar: what lies close together must still come apart.
TENSORS = [
    ("bfloat16", [3, 5], 1),
    ("uint8", [7], 2),
    ("float32", [], 3),
    ("int64", [0, 4], 4),
    ("float32", [1000, 300], 5),
]


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def trainer(pool):
    return pool.trainer()


@contextmanager
def closing_receiver(limits=LIMITS):
    receiver = open_receiver("process", limits, name="test")
    yield receiver
    receiver.close()


@pytest.fixture(scope="module", params=["process", "thread"])
def isolation(request):
    return request.param


@pytest.fixture(scope="module")
def kept(isolation):
    # gloo holds a thread of this process until the receive's own time is over.
    limits = LIMITS if isolation == "process" else replace(LIMITS, receive_secs=3.0)
    receiver = open_receiver(isolation, limits, name="test")
    receiver.warm()
    yield receiver
    receiver.close()


@pytest.fixture
def receiver(kept):
    """One for all tests of a kind: what a test leaves behind must not matter to the next."""
    yield kept
    for group in kept.status()["groups"]:
        kept.destroy(group["group_name"])


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

    told = [bucket(number, tensors) for number, tensors in enumerate(buckets)]
    return {"num_buckets": len(told), "buckets": told, **more}


def armed(receiver, *buckets, name="g", **more):
    return receiver.arm(name, plans_of(body_of(*buckets)), ready_secs=20, **more)


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


def wait_until(true, secs=30.0):
    pause = threading.Event()
    for _ in range(int(secs / 0.01)):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")


def moving(transfer):
    wait_until(lambda: transfer.progress().bytes_come or transfer.fault())
    assert transfer.fault() is None
    assert transfer.progress().messages_done == 0, "it was too fast for this test"


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_all_buckets_arrive_byte_for_byte_with_their_digests(
    receiver, trainer, tmp_path, load_format, in_file
):
    joined(receiver, trainer)
    buckets = [TENSORS[::-1], [("float64", [3], 6), ("bool", [9], 7)]]
    into = None
    if in_file:
        path = tmp_path / "version"
        path.write_bytes(b"\xaa" * 2_600_000)
        into = Place(str(path), (1_300_003, 9))
    plans = plans_of(body_of(*buckets, load_format=load_format), dense=in_file)
    transfer = receiver.arm("g", plans, ready_secs=20, into=into, digests=True)
    for bucket in buckets:
        trainer.order("send", group="g", tensors=bucket, flattened=load_format is not None)
    received = transfer.wait(20)
    sent = trainer.reply()["sent"] + trainer.reply()["sent"]
    tensors = received.tensors()
    assert [sha256(tensor) for tensor in tensors.values()] == sent
    assert received.digests == {name: strict(name, each) for name, each in tensors.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert (received.buckets, received.nbytes) == (2, total)
    progress = transfer.progress()
    assert (progress.buckets_done, progress.bytes_come) == (2, total)
    assert progress.messages_done == (2 if load_format else 7)
    if in_file:
        data = path.read_bytes()
        assert data[:9] == b"\xaa" * 9
        assert data[9:33] == raw(tensors["layer.1.0"])
        assert data[1_300_003:][:1_200_000] == raw(tensors["layer.0.0"])
        assert data.endswith(b"\xaa" * 9)
    del tensors
    left(receiver, trainer)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def strict(name, tensor):
    return tensor_digest(name, str(tensor.dtype), tensor.shape, raw(tensor))


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_large_tensor_is_hashed_while_it_comes(receiver, trainer):
    joined(receiver, trainer)
    transfer = armed(receiver, [("uint8", [100 << 20], 0)], digests=True)
    trainer.order("big", group="g", nbytes=100 << 20)
    digests = transfer.wait(20).digests
    assert digests == {
        "layer.0.0": tensor_digest("layer.0.0", "torch.uint8", [100 << 20], bytes(100 << 20))
    }
    trainer.reply()
    left(receiver, trainer)


def test_memory_is_used_again_only_when_nobody_looks_into_it(receiver, trainer):
    joined(receiver, trainer)

    def received():
        transfer = armed(receiver, [("uint8", [50_000], 1)])
        trainer.tell("send", group="g", tensors=[("uint8", [50_000], 1)])
        return transfer.wait(20)

    first = received()
    (tensor,) = first.tensors().values()
    before = tensor.clone()
    first.close()
    with pytest.raises(ValueError, match="given back"):
        first.tensors()
    tensor.fill_(0)
    second = received()
    (other,) = second.tensors().values()
    assert torch.equal(other, before)
    assert not tensor.any()
    kept_bytes = receiver.status()["kept_bytes"]
    del first, tensor
    # gloo's own thread may hold it for a moment after its work is done.
    wait_until(lambda: receiver.status()["kept_bytes"] >= kept_bytes + 50_000)
    left(receiver, trainer)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_trainer_that_sends_too_little_is_found_out(receiver, trainer, pool):
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1)], [("float32", [8], 2)])
    trainer.order("send", group="g", tensors=[("float32", [8], 1), ("float32", [6], 2)])
    with pytest.raises(GroupError, match=r"'layer\.1\.0' was announced with 32 bytes") as failure:
        transfer.wait(20)
    assert failure.value.group_dropped
    trainer.reply()
    trainer.tell("destroy", group="g")
    assert recovers(receiver, pool)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_trainer_that_sends_too_much_ends_nothing_but_its_group(receiver, pool):
    us = os.getpid()
    trainer = pool.trainer()
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1)])
    trainer.order("send", group="g", tensors=[("float32", [800], 1)])
    with pytest.raises(GroupError, match="sent more bytes than it announced") as failure:
        transfer.wait(20)
    assert failure.value.group_dropped
    assert str(transfer.fault()) == str(failure.value)
    assert os.getpid() == us
    trainer.kill()
    assert recovers(receiver, pool)


def test_a_trainer_that_dies_before_its_first_byte_is_noticed(receiver, pool):
    trainer = pool.trainer()
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1)])
    trainer.kill()
    wait_until(lambda: transfer.fault() is not None)  # nobody has to wait for that
    with pytest.raises(GroupError, match=r"Connection (closed|reset)|trainer has gone"):
        transfer.wait(0)
    with pytest.raises(GroupError, match=r"'g' is gone \(.*init_weights_update_group again"):
        armed(receiver, [("float32", [8], 1)])
    receiver.destroy("g")  # what a failure dropped may still be destroyed, once
    with pytest.raises(GroupError, match="does not exist"):
        receiver.destroy("g")
    assert recovers(receiver, pool)


def test_a_trainer_that_has_died_already_is_no_reason_to_be_ready(receiver, pool):
    trainer = pool.trainer()
    joined(receiver, trainer)
    trainer.kill()
    wait_until(lambda: receiver.status()["groups"][0]["owner_gone"])
    with pytest.raises(GroupError, match="the trainer has gone") as refusal:
        armed(receiver, [("float32", [8], 1)])
    assert refusal.value.group_dropped
    assert receiver.status()["groups"] == []


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_trainer_that_dies_while_bytes_move_is_noticed(receiver, pool):
    trainer = pool.trainer()
    joined(receiver, trainer)
    transfer = armed(receiver, [("uint8", [BIG_BYTES], 0)], digests=True)
    trainer.order("big", group="g", nbytes=BIG_BYTES)
    moving(transfer)
    trainer.kill()
    with pytest.raises(GroupError, match=r"trainer has gone|closed by peer|reset by peer"):
        transfer.wait(20)
    assert recovers(receiver, pool)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_trainer_that_stops_while_bytes_move_is_a_stall(receiver, pool):
    trainer = pool.trainer()
    joined(receiver, trainer)
    transfer = armed(receiver, [("uint8", [BIG_BYTES], 0)])
    trainer.order("big", group="g", nbytes=BIG_BYTES)
    moving(transfer)
    trainer.process.send_signal(signal.SIGSTOP)
    with pytest.raises(GroupError, match=r"nothing has come for 1 s") as failure:
        transfer.wait(20)
    assert failure.value.group_dropped
    trainer.kill()
    assert recovers(receiver, pool)


def test_a_trainer_that_exits_after_its_last_byte_has_sent_all(receiver, pool):
    trainer = Trainer()
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [400], 1)])
    trainer.tell("send", group="g", tensors=[("float32", [400], 1)])
    trainer.close()
    received = transfer.wait(20)
    assert received.nbytes == 1600
    received.close()


@pytest.mark.parametrize("isolation", ["thread"], indirect=True)
def test_who_waits_longer_than_allowed_disarms(receiver, trainer, pool):
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1)])
    with pytest.raises(GroupError, match=r"not complete within 0\.2 s") as failure:
        transfer.wait(0.2)
    assert failure.value.group_dropped
    assert receiver.status()["groups"] == []
    trainer.tell("destroy", group="g")
    assert recovers(receiver, pool)


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_an_abort_says_to_everybody_why(receiver, trainer):
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(transfer.wait, 20)
        transfer.abort("another rank refused")
        with pytest.raises(GroupError, match="another rank refused"):
            waiting.result()
    with pytest.raises(GroupError, match=r"gone.*another rank refused"):
        armed(receiver, [("float32", [8], 1)])
    trainer.tell("destroy", group="g")


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_who_is_not_armed_in_time_is_disarmed(receiver, trainer, monkeypatch):
    monkeypatch.setattr(in_process, "SLACK_SECS", 0.1)
    joined(receiver, trainer)
    os.kill(receiver.status()["groups"][0]["process"], signal.SIGSTOP)
    with pytest.raises(GroupError, match=r"no answer within 0\.2 s") as refusal:
        receiver.arm("g", plans_of(body_of(TENSORS)), ready_secs=0.1)
    assert refusal.value.group_dropped
    assert receiver.status()["groups"] == []
    trainer.tell("destroy", group="g")


def test_a_close_is_heard_by_who_waits(isolation, pool):
    receiver = open_receiver(isolation, LIMITS, name="closed")
    trainer = pool.trainer()
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(transfer.wait, 20)
        receiver.close()
        with pytest.raises(GroupError, match=r"closed|destroyed"):
            waiting.result()
    trainer.tell("destroy", group="g")


def test_the_first_byte_may_take_longer_than_a_stall(pool):
    receiver = open_receiver("process", Limits(stall_secs=0.2, first_byte_secs=20.0), name="x")
    trainer = pool.trainer()
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1), ("float32", [8], 2)])
    assert not transfer.ended(0.5)
    trainer.tell("send", group="g", tensors=[("float32", [8], 1)])
    with pytest.raises(GroupError, match=r"message 2 of 2: nothing has come for 0\.2 s"):
        transfer.wait(20)
    trainer.tell("destroy", group="g")
    receiver.close()


def test_what_is_armed_is_not_armed_twice(receiver, trainer):
    joined(receiver, trainer)
    transfer = armed(receiver, TENSORS[:1])
    with pytest.raises(GroupError, match="one receive at a time") as refusal:
        armed(receiver, TENSORS[:1])
    assert not refusal.value.group_dropped
    trainer.tell("send", group="g", tensors=TENSORS[:1])
    transfer.wait(20).close()
    assert works(receiver, trainer)
    left(receiver, trainer)


def test_a_group_is_destroyed_while_it_receives(receiver, trainer, pool):
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1)])
    receiver.destroy("g")
    with pytest.raises(GroupError, match="'g' was destroyed"):
        transfer.wait(20)
    with pytest.raises(GroupError, match="is not initialized"):
        armed(receiver, [("float32", [8], 1)])
    trainer.tell("destroy", group="g")
    assert recovers(receiver, pool)


def test_a_group_that_still_meets_is_destroyed(receiver):
    with ThreadPoolExecutor(1) as threads:
        init = threads.submit(receiver.init, meeting(free_port()))
        wait_until(lambda: receiver.status()["groups"])
        receiver.destroy("g")
        with pytest.raises(GroupError, match="'g' was destroyed"):
            init.result(20)


def test_a_meeting_is_given_up_at_a_word(receiver):
    stop = Stop()
    with ThreadPoolExecutor(1) as threads:
        init = threads.submit(receiver.init, meeting(free_port()), stop)
        wait_until(lambda: receiver.status()["groups"])
        stop.say("another rank refused")
        with pytest.raises(GroupError, match="another rank refused"):
            init.result(20)
    with pytest.raises(GroupError, match="another rank refused"):
        receiver.init(meeting(free_port()), stop)
    assert receiver.status()["groups"] == []


def test_a_word_that_comes_after_the_meeting_changes_nothing(receiver, trainer):
    stop = Stop()
    port = trainer.tell("open", group="g")["port"]
    receiver.init(meeting(port), stop)
    assert trainer.reply() == {"joined": True}
    stop.say("too late")
    assert works(receiver, trainer)
    left(receiver, trainer)


def test_a_port_that_accepts_and_says_nothing_is_told_in_time():
    with closing_receiver(replace(LIMITS, silent_secs=0.3)) as receiver:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(GroupError, match="no torch store answered"),
        ):
            receiver.init(meeting(listener.getsockname()[1]))
        assert receiver.status()["groups"] == []


def test_nobody_at_the_address_is_told_when_the_time_is_over(receiver):
    port = free_port()
    with pytest.raises(GroupError, match=f"waiting for the trainer's store at 127.0.0.1:{port}"):
        receiver.init(meeting(port, timeout_s=0.3))
    assert receiver.status()["groups"] == []


def test_a_group_is_replaced_only_when_its_trainer_has_gone(receiver, pool):
    first = pool.trainer()
    port = joined(receiver, first)
    with pytest.raises(GroupError, match=f"'g' is ready for the trainer at 127.0.0.1:{port}"):
        receiver.init(meeting(free_port()))
    assert works(receiver, first)
    transfer = armed(receiver, [("float32", [8], 1)])
    first.order("send", group="g", tensors=[])  # so that the pool gives out another one
    first.process.send_signal(signal.SIGSTOP)  # it keeps its sockets open, and answers nobody
    second = pool.trainer()
    joined(receiver, second)
    with pytest.raises(GroupError):
        transfer.wait(20)
    assert works(receiver, second)
    left(receiver, second)
    first.kill()


def test_what_does_not_fit_is_refused_with_the_numbers(receiver, trainer):
    joined(receiver, trainer)
    plans = plans_of({"names": ["w"], "dtypes": ["uint8"], "shapes": [[1 << 45]]})
    said = r"need 35184372088832 bytes, and there is memory for \d+"
    with pytest.raises(GroupError, match=said) as refusal:
        receiver.arm("g", plans, ready_secs=20)
    assert not refusal.value.group_dropped
    assert works(receiver, trainer)
    left(receiver, trainer)


@pytest.mark.parametrize(
    ("size", "starts", "said"),
    [
        (10, (0,), "has 10 bytes, and the buckets end at byte 32"),
        (100, (0, 40), "2 places for 1 buckets"),
        (None, (0,), "cannot be received into: No such file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(receiver, trainer, tmp_path, size, starts, said):
    joined(receiver, trainer)
    path = tmp_path / "version"
    if size is not None:
        path.write_bytes(bytes(size))
    with pytest.raises(GroupError, match=said) as refusal:
        armed(receiver, [("float32", [8], 1)], into=Place(str(path), starts))
    assert not refusal.value.group_dropped
    assert works(receiver, trainer)
    left(receiver, trainer)


def test_ten_cycles_leave_nothing_behind(receiver, trainer):
    def cycle(fails):
        joined(receiver, trainer)
        assert works(receiver, trainer)
        if fails:
            transfer = armed(receiver, [("uint8", [1 << 20], 1)])
            transfer.abort("a fault")
            del transfer
        left(receiver, trainer)

    def counted():
        gc.collect()
        receiver.status()
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(os.listdir("/dev/shm")),
            len(receiver.status().get("processes", [])),
        )

    for fails in (True, False, False):
        cycle(fails)
    wait_until(lambda: not receiver.status()["abandoned_threads"])
    before = counted()
    for number in range(10):
        cycle(number == 5)
    wait_until(lambda: counted() <= before or not settled(before, counted()))
    assert settled(before, counted())


def settled(before, after):
    return all(now <= then + 1 for then, now in zip(before, after, strict=True))


def test_after_the_close_nothing_is_joined(isolation):
    receiver = open_receiver(isolation, LIMITS, name="closed")
    receiver.close()
    with pytest.raises(GroupError, match="shutting down"):
        receiver.init(meeting(free_port()))


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_child_that_is_killed_is_told_and_replaced(receiver, trainer, pool):
    joined(receiver, trainer)
    transfer = armed(receiver, [("float32", [8], 1)])
    os.kill(receiver.status()["groups"][0]["process"], signal.SIGKILL)
    with pytest.raises(GroupError, match=r"after 0 of 1 buckets: .* ended by SIGKILL"):
        transfer.wait(20)
    trainer.tell("destroy", group="g")
    assert recovers(receiver, pool)


PARENT = """
import sys
from omni_proxy.collective.receiver import Limits, Place, Rendezvous, open_receiver
from omni_proxy.collective.specs import plans_of

receiver = open_receiver("process", Limits(), name="parent")
receiver.init(Rendezvous("127.0.0.1", int(sys.argv[1]), 1, 2, "g", "gloo", 20.0))
plans = plans_of({"names": ["w"], "dtypes": ["float32"], "shapes": [[8]]}, dense=True)
armed = receiver.arm("g", plans, ready_secs=20, into=Place(sys.argv[2], (0,)), digests=True)
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
        told = parent.stdout.readline()
        expected = tensor_digest("w", "torch.float32", [8], path.read_bytes())
        assert told == f"{expected} []\n"
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2  # one in the group, one to spare
        parent.kill()
    wait_until(lambda: not [child for child in children if os.path.exists(f"/proc/{child}")])
    trainer.tell("destroy", group="g")
