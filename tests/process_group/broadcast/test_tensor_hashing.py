import hashlib
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.process_group.broadcast.tensor_hashing import TensorHasher, roll_up, tensor_digest
from omni_proxy.process_group.tensor_plan import FLATTENED, ITEM_BYTES, make_plan, merge_plans

# name, type, shape, bytes, digest
KNOWN = [
    (
        "w", "torch.float32", (2, 2), struct.pack("<4f", 1, 0, 0, 1),
        "609ed39266cfc1059e6faf45d258c2dcfe57a0ad76618f5877ac250684ac21a2",
    ),
    (
        "v", "torch.float32", (3,), struct.pack("<3f", 1, 2, 3),
        "cf7c65fc506e36358b3c93d857c33b72ebd62db04573d3e1d48131e7e0c07673",
    ),
    (
        "s", "torch.bfloat16", (), bytes.fromhex("803f"),
        "876272530fc6b3130d68567368489a5a30a5e0af4ff232857e640bb2240ff3bf",
    ),
    (
        "b.w", "float32", (2, 3), struct.pack("<6f", *range(6)),
        "797fe3c5893a2599d0feb0c403574bcbb97b307911f75e9d8bafcf66050b3003",
    ),
    (
        "a.buf", "int64", (3,), struct.pack("<3q", 1, 2, 3),
        "347982da2231025d4cbf687010c41db7b1f61cc61310a13139d1554385bb0afc",
    ),
]  # fmt: skip
NAMES = st.text(st.characters(codec="utf-8"), max_size=12)
SHAPES = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
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


@pytest.mark.parametrize(("name", "dtype", "shape", "data", "digest"), KNOWN)
def test_a_tensor_has_the_digest_of_other_implementations(name, dtype, shape, data, digest):
    assert tensor_digest(name, dtype, shape, data) == digest
    assert tensor_digest(name, dtype, list(shape), memoryview(data)) == digest


def test_a_rank_has_the_checksum_of_other_implementations():
    digests = {name: digest for name, *_, digest in KNOWN if name in ("b.w", "a.buf")}
    assert roll_up(digests) == "f59c9fb5c97c0cd9947946b66d8ecd98aafa415fdbd107f5d4dbf4f3f654677f"


def test_the_checksum_of_no_tensors_is_the_hash_of_no_bytes():
    assert roll_up({}) == hashlib.sha256(b"").hexdigest()


@given(NAMES, st.sampled_from(["torch.float32", "torch.int8"]), SHAPES, st.binary(max_size=9000))
def test_a_digest_equals_the_hash_of_the_joined_parts(name, dtype, shape, data):
    whole = name.encode() + dtype.encode() + repr(shape).encode() + data
    assert tensor_digest(name, dtype, shape, data) == hashlib.sha256(whole).hexdigest()


@given(st.dictionaries(NAMES, st.binary(min_size=32, max_size=32).map(bytes.hex)), st.randoms())
def test_a_roll_up_hashes_digests_in_the_order_of_names(digests, chance):
    whole = "".join(name + digests[name] for name in sorted(digests, key=str))
    shuffled = list(digests.items())
    chance.shuffle(shuffled)
    assert roll_up(dict(shuffled)) == hashlib.sha256(whole.encode()).hexdigest()


@given(st.dictionaries(NAMES, st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=1))
def test_a_roll_up_depends_on_every_digest(digests):
    name = min(digests)
    other = digests | {name: digests[name].translate(str.maketrans("0123", "1230"))}
    assert (roll_up(other) == roll_up(digests)) == (other == digests)
