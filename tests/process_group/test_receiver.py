import pytest
import torch

from omni_proxy.process_group.broadcast.tensor_hashing import tensor_digest
from omni_proxy.process_group.receiver import FileRegion, GroupError
from omni_proxy.process_group.tensor_plan import parse_plans
from tests.process_group.receiver_steps import (
    TENSORS,
    arm,
    body_of,
    can_transfer,
    join_group,
    leave_group,
)
from tests.process_group.trainer_process import sha256
from tests.process_group.wait_helpers import wait_until


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_all_buckets_arrive_byte_for_byte_with_their_digests(
    receiver, trainer, tmp_path, load_format, in_file
):
    join_group(receiver, trainer)
    buckets = [TENSORS[::-1], [("float64", [3], 6), ("bool", [9], 7)]]
    into = None
    if in_file:
        path = tmp_path / "version"
        path.write_bytes(b"\xaa" * 2_600_000)
        into = FileRegion(str(path), (1_300_003, 9))
    plans = parse_plans(body_of(*buckets, load_format=load_format), dense=in_file)
    transfer = receiver.arm("g", plans, ready_secs=20, into=into, digests=True)
    for bucket in buckets:
        trainer.order("send", group="g", tensors=bucket, flattened=load_format is not None)
    received = transfer.wait(20)
    sent = trainer.reply()["sent"] + trainer.reply()["sent"]
    tensors = received.tensors()
    assert [sha256(tensor) for tensor in tensors.values()] == sent
    assert received.digests == {
        name: expected_digest(name, tensor) for name, tensor in tensors.items()
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert (received.buckets, received.nbytes) == (2, total)
    progress = transfer.progress()
    assert (progress.buckets_done, progress.bytes_received) == (2, total)
    assert progress.messages_done == (2 if load_format else 7)
    if in_file:
        data = path.read_bytes()
        assert data[:9] == b"\xaa" * 9
        assert data[9:33] == raw(tensors["layer.1.0"])
        assert data[1_300_003:][:1_200_000] == raw(tensors["layer.0.0"])
        assert data.endswith(b"\xaa" * 9)
    del tensors
    leave_group(receiver, trainer)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def expected_digest(name, tensor):
    return tensor_digest(name, str(tensor.dtype), tensor.shape, raw(tensor))


@pytest.mark.parametrize("isolation", ["process"], indirect=True)
def test_a_large_tensor_is_hashed_while_it_arrives(receiver, trainer):
    join_group(receiver, trainer)
    transfer = arm(receiver, [("uint8", [100 << 20], 0)], digests=True)
    trainer.order("send_zeros", group="g", nbytes=100 << 20)
    digests = transfer.wait(20).digests
    assert digests == {
        "layer.0.0": tensor_digest("layer.0.0", "torch.uint8", [100 << 20], bytes(100 << 20))
    }
    trainer.reply()
    leave_group(receiver, trainer)


def test_memory_is_reused_only_when_no_view_is_left(receiver, trainer):
    join_group(receiver, trainer)

    def receive_once():
        transfer = arm(receiver, [("uint8", [50_000], 1)])
        trainer.tell("send", group="g", tensors=[("uint8", [50_000], 1)])
        return transfer.wait(20)

    first = receive_once()
    (tensor,) = first.tensors().values()
    before = tensor.clone()
    first.close()
    with pytest.raises(ValueError, match="already released"):
        first.tensors()
    tensor.fill_(0)
    second = receive_once()
    (other,) = second.tensors().values()
    assert torch.equal(other, before)
    assert not tensor.any()
    kept_bytes = receiver.status()["kept_bytes"]
    del first, tensor
    # A thread of gloo may hold it for a moment after the transfer.
    wait_until(lambda: receiver.status()["kept_bytes"] >= kept_bytes + 50_000)
    leave_group(receiver, trainer)


def test_an_armed_group_cannot_be_armed_again(receiver, trainer):
    join_group(receiver, trainer)
    transfer = arm(receiver, TENSORS[:1])
    with pytest.raises(GroupError, match="one receive at a time") as refusal:
        arm(receiver, TENSORS[:1])
    assert not refusal.value.group_dropped
    trainer.tell("send", group="g", tensors=TENSORS[:1])
    transfer.wait(20).close()
    assert can_transfer(receiver, trainer)
    leave_group(receiver, trainer)


def test_a_tensor_that_exceeds_the_memory_is_refused_with_the_sizes(receiver, trainer):
    join_group(receiver, trainer)
    plans = parse_plans({"names": ["w"], "dtypes": ["uint8"], "shapes": [[1 << 45]]})
    message = r"need 35184372088832 bytes, but only \d+"
    with pytest.raises(GroupError, match=message) as refusal:
        receiver.arm("g", plans, ready_secs=20)
    assert not refusal.value.group_dropped
    assert can_transfer(receiver, trainer)
    leave_group(receiver, trainer)


@pytest.mark.parametrize(
    ("size", "starts", "message"),
    [
        (10, (0,), "has 10 bytes, and the buckets end at byte 32"),
        (100, (0, 40), "2 starts for 1 buckets"),
        (None, (0,), "cannot be received into: No such file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(receiver, trainer, tmp_path, size, starts, message):
    join_group(receiver, trainer)
    path = tmp_path / "version"
    if size is not None:
        path.write_bytes(bytes(size))
    with pytest.raises(GroupError, match=message) as refusal:
        arm(receiver, [("float32", [8], 1)], into=FileRegion(str(path), starts))
    assert not refusal.value.group_dropped
    assert can_transfer(receiver, trainer)
    leave_group(receiver, trainer)
