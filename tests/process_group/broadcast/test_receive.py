import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from omni_proxy.process_group.rank_protocol import GroupError, GroupLimits, Groups, Rendezvous
from omni_proxy.process_group.tensor_plan import ITEM_BYTES
from tests.process_group.trainer_process import DTYPES, sha256
from tests.process_group.wait_helpers import wait_until

BIG_BYTES = 384 << 20
WIDEST_FIRST = sorted(DTYPES, key=lambda dtype: -ITEM_BYTES[dtype])


@pytest.fixture
def groups():
    groups = Groups()
    yield groups
    groups.close()


@pytest.fixture
def groups_with_short_limits():
    # gloo blocks an abandoned thread until `receive_secs` have passed.
    groups = Groups(GroupLimits(stall_secs=1.0, receive_secs=3.0, first_byte_secs=3.0))
    yield groups
    groups.close()


def join_group(groups, trainer, name="g"):
    port = trainer.tell("open", group=name)["port"]
    groups.init(Rendezvous("127.0.0.1", port, 1, 2, name, "gloo", 30.0))
    assert trainer.reply() == {"joined": True}


def leave_group(groups, trainer, name="g"):
    groups.destroy(name)
    trainer.tell("destroy", group=name)


def specs_for(tensors):
    return [(f"layer.{index}", dtype, shape) for index, (dtype, shape, _) in enumerate(tensors)]


def sent_and_received(groups, trainer, tensors, **options):
    """The digests of the sent and of the received tensors."""
    flattened = options.pop("flattened", False)
    trainer.order("send", group="g", tensors=tensors, flattened=flattened)
    load_format = "flattened_bucket" if flattened else None
    tensors_by_name = groups.receive("g", specs_for(tensors), load_format, **options)
    return trainer.reply()["sent"], [sha256(tensor) for tensor in tensors_by_name.values()]


def recovers(groups, trainer):
    """Whether a transfer in a new group of the same name succeeds."""
    join_group(groups, trainer)
    sent, received = sent_and_received(groups, trainer, [("float32", [4], 1)])
    leave_group(groups, trainer)
    return sent == received


@pytest.mark.parametrize("dtypes", [DTYPES, WIDEST_FIRST], ids=["mixed", "wide first"])
def test_every_dtype_arrives_byte_for_byte(groups, trainer, dtypes):
    tensors = [(dtype, [3, 5], seed) for seed, dtype in enumerate(dtypes)]
    join_group(groups, trainer)
    sent, received = sent_and_received(groups, trainer, tensors)
    assert received == sent
    assert len(set(received)) == len(DTYPES)
    leave_group(groups, trainer)


@pytest.mark.parametrize("dtypes", [DTYPES[::-1], WIDEST_FIRST], ids=["narrow first", "wide first"])
def test_a_flattened_bucket_of_every_dtype_arrives_byte_for_byte(groups, trainer, dtypes):
    tensors = [(dtype, [3, 5], seed) for seed, dtype in enumerate(dtypes)]
    join_group(groups, trainer)
    sent, received = sent_and_received(groups, trainer, tensors, flattened=True)
    assert received == sent
    leave_group(groups, trainer)


@pytest.mark.parametrize("flattened", [False, True])
def test_scalars_and_empty_tensors_arrive(groups, trainer, flattened):
    tensors = [("float32", [], 1), ("int64", [0, 7], 2), ("float32", [2, 0], 3), ("uint8", [1], 4)]
    join_group(groups, trainer)
    sent, received = sent_and_received(groups, trainer, tensors, flattened=flattened)
    assert received == sent
    sent, received = sent_and_received(groups, trainer, tensors[1:3], flattened=flattened)
    assert received == sent
    leave_group(groups, trainer)


def test_dtypes_may_have_the_prefix_of_torch(groups, trainer):
    join_group(groups, trainer)
    trainer.order("send", group="g", tensors=[("bfloat16", [2, 2], 7)])
    received = groups.receive("g", [("w", "torch.bfloat16", (2, 2))])
    assert received["w"].dtype is torch.bfloat16
    assert received["w"].shape == (2, 2)
    trainer.reply()
    leave_group(groups, trainer)


def test_progress_ends_at_all_messages_and_all_bytes(groups, trainer):
    reports = []
    join_group(groups, trainer)
    tensors = [("uint8", [64 << 20], 1), ("float32", [4], 2)]
    sent_and_received(groups, trainer, tensors, progress=lambda *progress: reports.append(progress))
    assert reports[-1] == (2, (64 << 20) + 16)
    assert reports == sorted(reports)
    leave_group(groups, trainer)


def test_memory_is_reused_once_no_view_is_left(groups, trainer):
    join_group(groups, trainer)

    def receive_once():
        trainer.order("send", group="g", tensors=[("uint8", [4000], 1)])
        (tensor,) = groups.receive("g", [("w", "uint8", [4000])]).values()
        trainer.reply()
        return tensor

    first = receive_once()
    second = receive_once()
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    part, address = second[10:20], second.data_ptr()
    del second
    other_address = receive_once().data_ptr()
    assert other_address != address  # a view of it still exists
    # A thread of gloo may hold memory for a moment after the transfer.
    wait_until(lambda: groups.status()["kept_bytes"] == 4000)
    del part
    wait_until(lambda: groups.status()["kept_bytes"] == 8000)
    third, fourth = receive_once(), receive_once()
    assert {third.data_ptr(), fourth.data_ptr()} == {address, other_address}
    leave_group(groups, trainer)


@pytest.mark.parametrize(
    ("specs", "load_format", "message"),
    [
        ([], None, "no tensor"),
        ([("w", "complex64", [1])], None, "unknown dtype 'complex64'"),
        ([("w", "float32", [-1])], None, "integer of 0 or more"),
        ([("w", "float32", [1])], "direct_chunked:4", "unknown load_format 'direct_chunked:4'"),
        ([("w", "float32", [1 << 50])], None, "bytes of memory are free"),
        ([("w", "float32", [1 << 60])], None, "larger than any memory"),
    ],
)
def test_a_refused_receive_leaves_the_group_usable(groups, trainer, specs, load_format, message):
    join_group(groups, trainer)
    with pytest.raises(GroupError, match=message) as refusal:
        groups.receive("g", specs, load_format)
    assert not refusal.value.group_dropped
    sent, received = sent_and_received(groups, trainer, [("float32", [4], 1)])
    assert received == sent
    leave_group(groups, trainer)


def test_a_receive_in_an_unknown_group_is_refused(groups):
    with pytest.raises(GroupError, match="'g' is not initialized"):
        groups.receive("g", [("w", "float32", [1])])


def test_a_trainer_that_sends_too_little_for_one_tensor_is_reported(groups, trainer):
    join_group(groups, trainer)
    trainer.order("send", group="g", tensors=[("float32", [8], 1), ("float32", [6], 2)])
    with pytest.raises(GroupError, match=r"'b' was announced with 32 bytes, .* fewer") as failure:
        groups.receive("g", [("a", "float32", [8]), ("b", "float32", [8])])
    assert failure.value.group_dropped
    trainer.reply()
    assert recovers(groups, trainer)


def test_a_flattened_bucket_that_is_too_short_is_reported(groups, trainer):
    join_group(groups, trainer)
    trainer.order("send", group="g", tensors=[("float32", [30], 1)], flattened=True)
    with pytest.raises(GroupError, match="the flattened bucket of 2 tensors"):
        groups.receive("g", [("a", "float32", [30]), ("b", "float32", [2])], "flattened_bucket")
    trainer.reply()
    assert recovers(groups, trainer)


def test_a_trainer_that_dies_before_its_first_byte_is_noticed(groups, pool):
    trainer = pool.trainer()
    join_group(groups, trainer)
    with ThreadPoolExecutor(1) as threads:
        receive = threads.submit(groups.receive, "g", [("w", "float32", [8])])
        wait_until(lambda: groups.status()["groups"][0]["state"] == "receiving")
        trainer.kill()
        message = r"the receive failed at tensor 'w', message 1 of 1: .*Connection (closed|reset)"
        with pytest.raises(GroupError, match=message) as failure:
            receive.result()
    assert failure.value.group_dropped
    with pytest.raises(GroupError, match=r"'g' is gone \(.*init_weights_update_group again"):
        groups.receive("g", [("w", "float32", [8])])
    groups.destroy("g")  # a group that a failure dropped may be destroyed once
    with pytest.raises(GroupError, match="does not exist"):
        groups.destroy("g")
    assert recovers(groups, pool.trainer())


def test_a_trainer_that_dies_during_a_transfer_is_noticed(groups_with_short_limits, pool):
    trainer, groups = pool.trainer(), groups_with_short_limits
    join_group(groups, trainer)
    trainer.order("send_zeros", group="g", nbytes=BIG_BYTES)

    def kill(messages_done, bytes_received):
        assert messages_done == 0, "the transfer was too fast for this test"
        trainer.kill()

    with pytest.raises(GroupError, match=r"trainer has gone|closed by peer") as failure:
        groups.receive("g", [("w", "uint8", [BIG_BYTES])], progress=kill)
    assert failure.value.group_dropped
    assert recovers(groups, pool.trainer())
    # The abandoned thread of gloo ends.
    wait_until(lambda: not groups.status()["abandoned_threads"])


def test_a_trainer_that_stops_during_a_transfer_causes_a_stall(groups_with_short_limits, pool):
    trainer = pool.trainer()
    join_group(groups_with_short_limits, trainer)
    trainer.order("send_zeros", group="g", nbytes=BIG_BYTES)

    def stop(messages_done, bytes_received):
        assert messages_done == 0, "the transfer was too fast for this test"
        trainer.process.send_signal(signal.SIGSTOP)

    with pytest.raises(GroupError, match=r"nothing was received for 1 s"):
        groups_with_short_limits.receive("g", [("w", "uint8", [BIG_BYTES])], progress=stop)
    trainer.kill()
    assert len(groups_with_short_limits.status()["abandoned_threads"]) >= 1
    assert recovers(groups_with_short_limits, pool.trainer())


def test_a_receive_that_takes_too_long_fails(trainer):
    groups = Groups(GroupLimits(receive_secs=0.2))
    join_group(groups, trainer)
    with pytest.raises(GroupError, match=r"not complete within 0\.2 s"):
        groups.receive("g", [("w", "float32", [8])])
    trainer.tell("destroy", group="g")


def test_a_trainer_that_sends_only_some_of_the_tensors_causes_a_stall(
    groups_with_short_limits, trainer
):
    tensors = [("float32", [4], 1), ("float32", [4], 2)]
    join_group(groups_with_short_limits, trainer)
    trainer.order("send", group="g", tensors=tensors, stop_after=1)
    with pytest.raises(
        GroupError, match=r"at tensor 'layer\.1', message 2 of 2: nothing was received"
    ):
        groups_with_short_limits.receive("g", specs_for(tensors))
    trainer.reply()
    trainer.tell("destroy", group="g")
    assert recovers(groups_with_short_limits, trainer)
    # The trainer closed its connection, which ends the abandoned thread.
    wait_until(lambda: not groups_with_short_limits.status()["abandoned_threads"])


def test_ranks_that_receive_from_another_rank_detect_a_short_message(trainer):
    ranks = (1, 2, 3)  # gloo broadcasts in a tree: some ranks receive from another rank
    groups = {rank: Groups(GroupLimits(stall_secs=5.0)) for rank in ranks}
    port = trainer.tell("open", group="g", world=4)["port"]
    with ThreadPoolExecutor(3) as threads:
        joins = [
            threads.submit(
                rank_groups.init, Rendezvous("127.0.0.1", port, rank, 4, "g", "gloo", 30.0)
            )
            for rank, rank_groups in groups.items()
        ]
        assert [join.result() for join in joins] == [None] * 3
        assert trainer.reply() == {"joined": True}
        specs = [("w", "float32", [1000])]
        receives = [
            threads.submit(rank_groups.receive, "g", specs) for rank_groups in groups.values()
        ]
        trainer.tell("send", group="g", tensors=[("float32", [600], 1)])
        for receive in receives:
            with pytest.raises(GroupError, match=r"announced with 4000 bytes.*sent fewer"):
                receive.result()
    trainer.tell("destroy", group="g")


def test_a_group_refuses_a_second_receive_at_the_same_time(groups, trainer):
    join_group(groups, trainer)
    with ThreadPoolExecutor(1) as threads:
        receive = threads.submit(groups.receive, "g", [("w", "float32", [2])])
        wait_until(lambda: groups.status()["groups"][0]["state"] == "receiving")
        with pytest.raises(GroupError, match="one receive at a time"):
            groups.receive("g", [("w", "float32", [2])])
        trainer.tell("send", group="g", tensors=[("float32", [2], 1)])
        assert receive.result()["w"].shape == (2,)
    leave_group(groups, trainer)


@pytest.mark.parametrize("end", [lambda groups: groups.destroy("g"), Groups.close])
def test_a_receive_can_be_ended_from_another_thread(groups, trainer, end):
    join_group(groups, trainer)
    with ThreadPoolExecutor(1) as threads:
        receive = threads.submit(groups.receive, "g", [("w", "float32", [2])])
        wait_until(lambda: groups.status()["groups"][0]["state"] == "receiving")
        end(groups)
        with pytest.raises(GroupError, match="'g' was destroyed"):
            receive.result()
    assert groups.status()["groups"] == []
    trainer.tell("destroy", group="g")
    wait_until(lambda: not groups.status()["abandoned_threads"])


def test_an_error_in_the_progress_callback_ends_the_receive(groups, trainer):
    join_group(groups, trainer)

    def fail(messages_done, bytes_received):
        raise LookupError("mine")

    trainer.order("send", group="g", tensors=[("float32", [4], 1)])
    with pytest.raises(LookupError, match="mine"):
        groups.receive("g", [("w", "float32", [4])], progress=fail)
    assert groups.status()["groups"] == []
    trainer.reply()
    trainer.tell("destroy", group="g")
