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


def whole_of(buckets, load_format, dense):
    plans = []
    for number, pairs in enumerate(buckets):
        named = [(f"{number}.{index}", *pair) for index, pair in enumerate(pairs)]
        plans.append(make_plan(named, load_format, dense=dense))
    return merge_plans(plans)


def expected(plan, memory):
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
def test_digests_equal_those_of_replicas_for_any_chunking(buckets, load_format, dense, chance):
    plan = whole_of(buckets, load_format, dense)
    final = bytes(chance.randbytes(plan.block_bytes))
    memory = bytearray(plan.block_bytes)
    hashing = TensorHasher(plan, lambda start, size: memoryview(memory)[start : start + size], "t")
    for number, message in enumerate(plan.messages):
        # Nothing may be looked at before it has come, so it comes only then.
        settled = chance.randint(0, message.nbytes)
        stop = message.offset + settled
        memory[message.offset : stop] = final[message.offset : stop]
        hashing.update(number, settled)
        stop = message.offset + message.nbytes
        memory[message.offset : stop] = final[message.offset : stop]
    hashing.update(len(plan.messages), 0)
    digests = hashing.digests()
    assert digests == expected(plan, final)
    assert list(digests) == [tensor.name for tensor in plan.tensors]


@pytest.mark.parametrize("come", [(0, 0), (1, 3)])
def test_a_cancelled_hasher_leaves_no_thread_waiting(come):
    plan = whole_of([[("uint8", [4]), ("uint8", [8]), ("uint8", [4])]], None, True)
    hashing = TensorHasher(plan, lambda start, size: bytes(size), "given-up")
    hashing.update(*come)
    hashing.cancel()
    for thread in hashing._threads:
        thread.join(30)
    assert "weights-digest-given-up" not in [thread.name for thread in threading.enumerate()]
