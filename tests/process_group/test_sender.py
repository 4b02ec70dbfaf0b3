import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from omni_proxy.process_group.receiver import (
    FileRegion,
    GroupError,
    GroupLimits,
    HostedRendezvous,
    Rendezvous,
    open_receiver,
)
from omni_proxy.process_group.tensor_plan import parse_plans
from tests.process_group.wait_helpers import wait_until

LIMITS = GroupLimits(stall_secs=3.0, silent_secs=10.0)
TENSORS = {
    "a": torch.arange(12000, dtype=torch.float32).reshape(30, 400),
    "b": torch.arange(7, dtype=torch.uint8),
    "c": torch.tensor(3.0, dtype=torch.bfloat16),
    "d": torch.zeros(0, 4),
    "e": torch.arange(24).reshape(4, 6).t(),
}


@pytest.fixture(scope="module", params=["process", "thread"])
def local(request):
    receiver = open_receiver(request.param, LIMITS, name="sends")
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def remote():
    """The remote rank. It is in a child process, so that both ranks are never in one process."""
    receiver = open_receiver("process", LIMITS, name="remote")
    receiver.warm()
    yield receiver
    receiver.close()


@pytest.fixture
def sender(local):
    sender = local.sender(HostedRendezvous("127.0.0.1", 2, "relay", timeout_s=20.0))
    yield sender
    sender.close()


@pytest.fixture
def joined_sender(sender, remote):
    with ThreadPoolExecutor(1) as threads:
        rendezvous = threads.submit(sender.wait_for_ranks)
        remote.init(Rendezvous("127.0.0.1", sender.port, 1, 2, "relay", "gloo", 20.0))
        rendezvous.result(20)
    yield sender
    for group in remote.status()["groups"]:
        remote.destroy(group["group_name"])


def body_of(tensors, load_format=None):
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "load_format": load_format,
    }


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_tensors_arrive_byte_for_byte(joined_sender, remote, tmp_path, load_format, in_file):
    source = TENSORS
    plans = parse_plans(body_of(TENSORS, load_format), dense=in_file)
    if in_file:
        path = tmp_path / "version"
        path.write_bytes(b"header!" + b"".join(map(raw, TENSORS.values())))
        source = FileRegion(str(path), (7,))
    for _ in range(2):
        armed = remote.arm("relay", plans, ready_secs=20)
        sending = joined_sender.send(plans, source)
        sent = sending.wait(20)
        received = armed.wait(20)
        assert sent.nbytes == received.nbytes == sending.progress().bytes_received
        for name, tensor in received.tensors().items():
            assert torch.equal(tensor, TENSORS[name])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "'a' is announced, but is not among those to send"),
        ({"a": torch.zeros(30, 401)}, r"announced as float32 \[30, 400\], and is .* \[30, 401\]"),
        ({"a": torch.zeros(30, 400).half()}, "and is float16"),
        (FileRegion("/dev/null", (0,)), "/dev/null has 0 bytes"),
        (FileRegion("/nowhere", (0,)), "/nowhere cannot be read: No such file"),
    ],
)
def test_a_source_that_does_not_match_the_announcement_is_refused(
    joined_sender, remote, source, message
):
    tensors = {"a": TENSORS["a"]}
    plans = parse_plans(body_of(tensors))
    with pytest.raises(GroupError, match=message) as refusal:
        joined_sender.send(plans, source)
    assert not refusal.value.group_dropped
    armed = remote.arm("relay", plans, ready_secs=20)
    joined_sender.send(plans, tensors).wait(20)
    armed.wait(20).close()


def test_a_receiver_that_dies_ends_the_send(joined_sender, remote):
    plans = parse_plans(body_of({"w": torch.zeros(64 << 20, dtype=torch.uint8)}))
    sending = joined_sender.send(plans, {"w": torch.zeros(64 << 20, dtype=torch.uint8)})
    remote.destroy("relay")  # never armed: the sender notices that its connections are closed
    with pytest.raises(GroupError, match=r"send failed after 0 of 1 messages|ended") as failure:
        sending.wait(20)
    assert failure.value.group_dropped
    with pytest.raises(GroupError, match=r"ended|gone"):
        joined_sender.send(plans, {"w": torch.zeros(64 << 20, dtype=torch.uint8)})


def test_a_receiver_that_does_not_receive_causes_a_stall(joined_sender):
    weights = {"w": torch.zeros(4 << 20, dtype=torch.uint8)}
    sending = joined_sender.send(parse_plans(body_of(weights)), weights)
    with pytest.raises(GroupError, match="tensor 'w' was not taken within 3 s"):
        sending.wait(20)


def test_missing_ranks_end_the_rendezvous(local):
    sender = local.sender(HostedRendezvous("127.0.0.1", 3, "relay", timeout_s=2.0))
    with pytest.raises(GroupError, match=r"(?i)within 2 s|timeout|timed out"):
        sender.wait_for_ranks()
    sender.close()


def test_sending_before_the_ranks_have_joined_is_refused(sender):
    with pytest.raises(GroupError, match="have not joined yet"):
        sender.send(parse_plans(body_of(TENSORS)), TENSORS)


def test_a_port_in_use_is_an_error(local, sender):
    with pytest.raises(GroupError, match=f"no store at 127.0.0.1:{sender.port}: .*in use"):
        local.sender(HostedRendezvous("127.0.0.1", 2, "relay", port=sender.port))


def test_a_group_of_one_is_refused(local):
    with pytest.raises(GroupError, match="world_size 1"):
        local.sender(HostedRendezvous("127.0.0.1", 1, "relay"))


def test_a_receiver_notices_the_end_of_the_sender_at_once(joined_sender, remote):
    armed = remote.arm("relay", parse_plans(body_of(TENSORS)), ready_secs=20)
    joined_sender.close()
    with pytest.raises(GroupError, match=r"has gone|closed|reset"):
        armed.wait(20)


def test_a_closed_sender_leaves_no_thread(local):
    def open_and_close():
        local.sender(HostedRendezvous("127.0.0.1", 2, "relay")).close()

    open_and_close()
    before = threading.active_count()
    for _ in range(3):
        open_and_close()
    # A spare child may still be starting.
    wait_until(lambda: threading.active_count() <= before + 1)
