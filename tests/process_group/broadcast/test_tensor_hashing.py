import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.process_group.broadcast.tensor_hashing import TensorHasher
from omni_proxy.process_group.tensor_plan import FLATTENED, ITEM_BYTES, make_plan, merge_plans
from omni_proxy.weight_sync.checksum import tensor_digest

SPECS = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 9), max_size=3)),
    min_size=1,
    max_size=6,
)


def merged_plan(buckets, load_format, dense):
    plans = []
    for number, pairs in enumerate(buckets):
        named = [(f"{number}.{index}", *pair) for index, pair in enumerate(pairs)]
        plans.append(make_plan(named, load_format, dense=dense))
    return merge_plans(plans)


def expected_digests(plan, memory):
    return {
        tensor.name: tensor_digest(
            tensor.name,
            f"torch.{tensor.dtype}",
            tensor.shape,
            memory[offset : offset + tensor.nbytes],
        )
        for tensor, offset in zip(plan.tensors, plan.offsets, strict=True)
    }


@given(
    st.lists(SPECS, min_size=1, max_size=3),
    st.sampled_from([None, FLATTENED]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_digests_equal_those_of_replicas_for_any_chunking(buckets, load_format, dense, random):
    plan = merged_plan(buckets, load_format, dense)
    final = bytes(random.randbytes(plan.block_bytes))
    memory = bytearray(plan.block_bytes)
    hasher = TensorHasher(plan, lambda start, size: memoryview(memory)[start : start + size], "t")
    for number, message in enumerate(plan.messages):
        # Bytes are written just before they are reported: a hasher that reads early gets zeros.
        length = random.randint(0, message.nbytes)
        stop = message.offset + length
        memory[message.offset : stop] = final[message.offset : stop]
        hasher.update(number, length)
        stop = message.offset + message.nbytes
        memory[message.offset : stop] = final[message.offset : stop]
    hasher.update(len(plan.messages), 0)
    digests = hasher.digests()
    assert digests == expected_digests(plan, final)
    assert list(digests) == [tensor.name for tensor in plan.tensors]


@pytest.mark.parametrize("progress", [(0, 0), (1, 3)])
def test_a_cancelled_hasher_leaves_no_thread_waiting(progress):
    plan = merged_plan([[("uint8", [4]), ("uint8", [8]), ("uint8", [4])]], None, True)
    hasher = TensorHasher(plan, lambda start, size: bytes(size), "cancelled")
    hasher.update(*progress)
    hasher.cancel()
    for thread in threading.enumerate():
        if thread.name == "weights-digest-cancelled":
            thread.join(30)
            assert not thread.is_alive()
