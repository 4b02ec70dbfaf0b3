import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from omni_proxy.process_group.rank_protocol import GroupError, GroupLimits, Groups, Rendezvous
from omni_proxy.process_group.tensor_plan import ITEM_BYTES
from tests.process_group.trainer_process import DTYPES, sha256
from tests.process_group.wait_helpers import wait_until

BIG_BYTES = 384 << 20
WIDE_FIRST = sorted(DTYPES, key=lambda dtype: -ITEM_BYTES[dtype])


@pytest.fixture
def groups():
    groups = Groups()
    yield groups
    groups.close()


@pytest.fixture
def impatient():
    # gloo holds a thread that was given up until the receive's own time is over.
    groups = Groups(GroupLimits(stall_secs=1.0, receive_secs=3.0, first_byte_secs=3.0))
    yield groups
    groups.close()


def joined(groups, trainer, name="g"):
    port = trainer.tell("open", group=name)["port"]
    groups.init(Rendezvous("127.0.0.1", port, 1, 2, name, "gloo", 30.0))
    assert trainer.reply() == {"joined": True}


def left(groups, trainer, name="g"):
    groups.destroy(name)
    trainer.tell("destroy", group=name)


def specs_for(tensors):
    return [(f"layer.{index}", dtype, shape) for index, (dtype, shape, _) in enumerate(tensors)]


def sent_and_received(groups, trainer, tensors, **how):
    """The trainer's digests, and ours of what came."""
    flattened = how.pop("flattened", False)
    trainer.order("send", group="g", tensors=tensors, flattened=flattened)
    load_format = "flattened_bucket" if flattened else None
    received = groups.receive("g", specs_for(tensors), load_format, **how)
    return trainer.reply()["sent"], [sha256(tensor) for tensor in received.values()]


def recovers(groups, trainer):
    """Whether the next group of the name works as if nothing had been."""
    joined(groups, trainer)
    sent, came = sent_and_received(groups, trainer, [("float32", [4], 1)])
    left(groups, trainer)
    return sent == came


@pytest.mark.parametrize("dtypes", [DTYPES, WIDE_FIRST], ids=["mixed", "wide first"])
def test_every_dtype_arrives_byte_for_byte(groups, trainer, dtypes):
    tensors = [(dtype, [3, 5], seed) for seed, dtype in enumerate(dtypes)]
    joined(groups, trainer)
    sent, came = sent_and_received(groups, trainer, tensors)
    assert came == sent
    assert len(set(came)) == len(DTYPES)
    left(groups, trainer)


@pytest.mark.parametrize("dtypes", [DTYPES[::-1], WIDE_FIRST], ids=["narrow first", "wide first"])
def test_a_flattened_bucket_of_every_dtype_arrives_byte_for_byte(groups, trainer, dtypes):
    tensors = [(dtype, [3, 5], seed) for seed, dtype in enumerate(dtypes)]
    joined(groups, trainer)
    sent, came = sent_and_received(groups, trainer, tensors, flattened=True)
    assert came == sent
    left(groups, trainer)


@pytest.mark.parametrize("flattened", [False, True])
def test_scalars_and_empty_tensors_arrive_too(groups, trainer, flattened):
    tensors = [("float32", [], 1), ("int64", [0, 7], 2), ("float32", [2, 0], 3), ("uint8", [1], 4)]
    joined(groups, trainer)
    sent, came = sent_and_received(groups, trainer, tensors, flattened=flattened)
    assert came == sent
    sent, came = sent_and_received(groups, trainer, tensors[1:3], flattened=flattened)
    assert came == sent
    left(groups, trainer)


def test_dtypes_may_be_written_as_torch_prints_them(groups, trainer):
    joined(groups, trainer)
    trainer.order("send", group="g", tensors=[("bfloat16", [2, 2], 7)])
    received = groups.receive("g", [("w", "torch.bfloat16", (2, 2))])
    assert received["w"].dtype is torch.bfloat16
    assert received["w"].shape == (2, 2)
    trainer.reply()
    left(groups, trainer)


def test_progress_ends_at_all_messages_and_all_bytes(groups, trainer):
    seen = []
    joined(groups, trainer)
    tensors = [("uint8", [64 << 20], 1), ("float32", [4], 2)]
    sent_and_received(groups, trainer, tensors, progress=lambda *come: seen.append(come))
    assert seen[-1] == (2, (64 << 20) + 16)
    assert seen == sorted(seen)
    left(groups, trainer)


def test_memory_is_reused_once_no_view_is_left(groups, trainer):
    joined(groups, trainer)

    def received():
        trainer.order("send", group="g", tensors=[("uint8", [4000], 1)])
        (tensor,) = groups.receive("g", [("w", "uint8", [4000])]).values()
        trainer.reply()
        return tensor

    first = received()
    second = received()
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    part, place = second[10:20], second.data_ptr()
    del second
    assert received().data_ptr() != place  # a part of it is still looked at
    # gloo's own thread may hold memory for a moment after its work is done.
    wait_until(lambda: groups.status()["kept_bytes"] == 4000)
    del part
    wait_until(lambda: groups.status()["kept_bytes"] == 8000)
    places = [block.ctypes.data for block in groups._buffers._unused]
    assert place in places
    assert received().data_ptr() in places
    left(groups, trainer)


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
def test_what_is_refused_leaves_the_group_as_it_was(groups, trainer, specs, load_format, message):
    joined(groups, trainer)
    with pytest.raises(GroupError, match=message) as refusal:
        groups.receive("g", specs, load_format)
    assert not refusal.value.group_dropped
    sent, came = sent_and_received(groups, trainer, [("float32", [4], 1)])
    assert came == sent
    left(groups, trainer)


def test_a_group_that_is_not_there_receives_nothing(groups):
    with pytest.raises(GroupError, match="'g' is not initialized"):
        groups.receive("g", [("w", "float32", [1])])


def test_a_trainer_that_sends_too_little_for_one_tensor_is_found_out(groups, trainer):
    joined(groups, trainer)
    trainer.order("send", group="g", tensors=[("float32", [8], 1), ("float32", [6], 2)])
    with pytest.raises(GroupError, match=r"'b' was announced with 32 bytes, .* fewer") as failure:
        groups.receive("g", [("a", "float32", [8]), ("b", "float32", [8])])
    assert failure.value.group_dropped
    trainer.reply()
    assert recovers(groups, trainer)


def test_a_flattened_bucket_that_is_too_short_is_found_out(groups, trainer):
    joined(groups, trainer)
    trainer.order("send", group="g", tensors=[("float32", [30], 1)], flattened=True)
    with pytest.raises(GroupError, match="the flattened bucket of 2 tensors"):
        groups.receive("g", [("a", "float32", [30]), ("b", "float32", [2])], "flattened_bucket")
    trainer.reply()
    assert recovers(groups, trainer)


def test_a_trainer_that_dies_before_its_first_byte_is_noticed(groups, pool):
    trainer = pool.trainer()
    joined(groups, trainer)
    with ThreadPoolExecutor(1) as threads:
        receive = threads.submit(groups.receive, "g", [("w", "float32", [8])])
        wait_until(lambda: groups.status()["groups"][0]["state"] == "receiving")
        trainer.kill()
        output = r"the receive failed at tensor 'w', message 1 of 1: .*Connection (closed|reset)"
        with pytest.raises(GroupError, match=output) as failure:
            receive.result()
    assert failure.value.group_dropped
    with pytest.raises(GroupError, match=r"'g' is gone \(.*init_weights_update_group again"):
        groups.receive("g", [("w", "float32", [8])])
    groups.destroy("g")  # what a failure dropped may still be destroyed, once
    with pytest.raises(GroupError, match="does not exist"):
        groups.destroy("g")
    assert recovers(groups, pool.trainer())


def test_a_trainer_that_dies_while_bytes_move_is_noticed(impatient, pool):
    trainer, groups = pool.trainer(), impatient
    joined(groups, trainer)
    trainer.order("big", group="g", nbytes=BIG_BYTES)

    def kill(messages_done, bytes_received):
        assert messages_done == 0, "it was too fast for this test"
        trainer.kill()

    with pytest.raises(GroupError, match=r"trainer has gone|closed by peer") as failure:
        groups.receive("g", [("w", "uint8", [BIG_BYTES])], progress=kill)
    assert failure.value.group_dropped
    assert recovers(groups, pool.trainer())
    # gloo's thread is known, and it ends.
    wait_until(lambda: not groups.status()["abandoned_threads"])


def test_a_trainer_that_stops_while_bytes_move_is_a_stall(impatient, pool):
    trainer = pool.trainer()
    joined(impatient, trainer)
    trainer.order("big", group="g", nbytes=BIG_BYTES)

    def stop(messages_done, bytes_received):
        assert messages_done == 0, "it was too fast for this test"
        trainer.process.send_signal(signal.SIGSTOP)

    with pytest.raises(GroupError, match=r"nothing was received for 1 s"):
        impatient.receive("g", [("w", "uint8", [BIG_BYTES])], progress=stop)
    trainer.kill()
    assert len(impatient.status()["abandoned_threads"]) >= 1
    assert recovers(impatient, pool.trainer())


def test_a_receive_has_a_time_of_its_own(trainer):
    groups = Groups(GroupLimits(receive_secs=0.2))
    joined(groups, trainer)
    with pytest.raises(GroupError, match=r"not complete within 0\.2 s"):
        groups.receive("g", [("w", "float32", [8])])
    trainer.tell("destroy", group="g")


def test_a_trainer_that_sends_only_some_of_the_tensors_is_a_stall(impatient, trainer):
    tensors = [("float32", [4], 1), ("float32", [4], 2)]
    joined(impatient, trainer)
    trainer.order("send", group="g", tensors=tensors, stop_after=1)
    with pytest.raises(
        GroupError, match=r"at tensor 'layer\.1', message 2 of 2: nothing was received"
    ):
        impatient.receive("g", specs_for(tensors))
    trainer.reply()
    trainer.tell("destroy", group="g")
    assert recovers(impatient, trainer)
    # Its end of the connection closed: that lets go of a thread which nothing else could.
    wait_until(lambda: not impatient.status()["abandoned_threads"])


def test_what_is_too_short_is_found_out_by_ranks_that_get_it_from_another_one(trainer):
    ranks = (1, 2, 3)  # gloo sends in a tree: not all of them hear the trainer itself
    groups = {rank: Groups(GroupLimits(stall_secs=5.0)) for rank in ranks}
    port = trainer.tell("open", group="g", world=4)["port"]
    with ThreadPoolExecutor(3) as threads:
        meet = [
            threads.submit(each.init, Rendezvous("127.0.0.1", port, rank, 4, "g", "gloo", 30.0))
            for rank, each in groups.items()
        ]
        assert [each.result() for each in meet] == [None] * 3
        assert trainer.reply() == {"joined": True}
        specs = [("w", "float32", [1000])]
        receives = [threads.submit(each.receive, "g", specs) for each in groups.values()]
        trainer.tell("send", group="g", tensors=[("float32", [600], 1)])
        for each in receives:
            with pytest.raises(GroupError, match=r"announced with 4000 bytes.*sent fewer"):
                each.result()
    trainer.tell("destroy", group="g")


def test_one_group_receives_one_thing_at_a_time(groups, trainer):
    joined(groups, trainer)
    with ThreadPoolExecutor(1) as threads:
        receive = threads.submit(groups.receive, "g", [("w", "float32", [2])])
        wait_until(lambda: groups.status()["groups"][0]["state"] == "receiving")
        with pytest.raises(GroupError, match="one receive at a time"):
            groups.receive("g", [("w", "float32", [2])])
        trainer.tell("send", group="g", tensors=[("float32", [2], 1)])
        assert receive.result()["w"].shape == (2,)
    left(groups, trainer)


@pytest.mark.parametrize("end", [lambda groups: groups.destroy("g"), Groups.close])
def test_a_receive_can_be_ended_from_another_thread(groups, trainer, end):
    joined(groups, trainer)
    with ThreadPoolExecutor(1) as threads:
        receive = threads.submit(groups.receive, "g", [("w", "float32", [2])])
        wait_until(lambda: groups.status()["groups"][0]["state"] == "receiving")
        end(groups)
        with pytest.raises(GroupError, match="'g' was destroyed"):
            receive.result()
    assert groups.status()["groups"] == []
    trainer.tell("destroy", group="g")
    wait_until(lambda: not groups.status()["abandoned_threads"])


def test_a_listener_that_fails_ends_the_receive_with_its_own_error(groups, trainer):
    joined(groups, trainer)

    def listen(messages_done, bytes_received):
        raise LookupError("mine")

    trainer.order("send", group="g", tensors=[("float32", [4], 1)])
    with pytest.raises(LookupError, match="mine"):
        groups.receive("g", [("w", "float32", [4])], progress=listen)
    assert groups.status()["groups"] == []
    trainer.reply()
    trainer.tell("destroy", group="g")
