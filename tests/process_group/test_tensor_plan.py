import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.process_group.tensor_plan import (
    ALIGNMENT_BYTES,
    FLATTENED,
    ITEM_BYTES,
    GroupError,
    make_plan,
    merge_plans,
    parse_plans,
    parse_specs,
)
from tests.tree import ROOT

SHAPES = st.lists(st.integers(0, 9), max_size=4)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), min_size=1, max_size=12)


def named(pairs):
    return [(f"layer.{index}", dtype, shape) for index, (dtype, shape) in enumerate(pairs)]


def size_bytes(dtype, shape):
    total = ITEM_BYTES[dtype]
    for dimension in shape:
        total *= dimension
    return total


@given(SPECS)
def test_tensors_sent_one_by_one_are_aligned_and_never_overlap(pairs):
    plan = make_plan(named(pairs))
    end = 0
    for tensor, offset, message in zip(plan.tensors, plan.offsets, plan.messages, strict=True):
        assert offset >= end
        assert offset % ALIGNMENT_BYTES == 0
        assert (message.offset, message.nbytes) == (offset, tensor.nbytes)
        end = offset + tensor.nbytes
    assert plan.block_bytes == end
    assert [tensor.nbytes for tensor in plan.tensors] == [size_bytes(*pair) for pair in pairs]


@given(SPECS, st.booleans())
def test_a_flattened_bucket_is_contiguous(pairs, dense):
    ends = list(itertools.accumulate(size_bytes(*pair) for pair in pairs))
    plan = make_plan(named(pairs), FLATTENED, dense=dense)
    assert list(plan.offsets) == [0, *ends[:-1]]
    (message,) = plan.messages
    assert (message.offset, message.nbytes) == (0, ends[-1])
    assert plan.block_bytes == ends[-1]


@given(SPECS)
def test_a_dense_plan_is_contiguous_with_one_message_for_each_tensor(pairs):
    plan = make_plan(named(pairs), dense=True)
    assert plan.offsets == make_plan(named(pairs), FLATTENED).offsets
    assert [message.nbytes for message in plan.messages] == [size_bytes(*pair) for pair in pairs]
    assert [message.offset for message in plan.messages] == list(plan.offsets)


BUCKET = {"names": ["a", "b"], "dtypes": ["uint8", "float32"], "shapes": [[3], [2]]}
OTHER = {"names": ["c"], "dtypes": ["bool"], "shapes": [[]]}


def test_both_forms_of_a_prepare_give_the_same_plans():
    (plan,) = parse_plans(BUCKET)
    assert parse_plans({"buckets": [BUCKET, OTHER], "num_buckets": 2, "group_name": "g"}) == (
        plan,
        *parse_plans(OTHER),
    )
    assert parse_plans({**BUCKET, "buckets": None, "num_buckets": 1}) == (plan,)
    assert parse_plans({**BUCKET, "buckets": []}) == (plan,)


def test_buckets_take_precedence_over_names_at_the_top_level():
    (plan,) = parse_plans({**BUCKET, "buckets": [OTHER]})
    assert [tensor.name for tensor in plan.tensors] == ["c"]


@pytest.mark.parametrize("transport", [None, "nccl_broadcast", "nccl", "gloo"])
def test_broadcast_transports_are_accepted(transport):
    assert parse_plans({**BUCKET, "transport": transport}) == parse_plans(BUCKET)


def test_the_load_format_applies_to_all_buckets():
    plans = parse_plans({"buckets": [BUCKET, OTHER], "load_format": FLATTENED})
    assert [len(plan.messages) for plan in plans] == [1, 1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "nothing is announced"),
        ({"buckets": []}, "nothing is announced"),
        ({"buckets": {"names": []}}, "buckets must be a list, not dict"),
        ({"buckets": [BUCKET, 3]}, "bucket 2 of 2 must be an object"),
        ({"buckets": [BUCKET], "num_buckets": 2}, "num_buckets is 2, but 1 are announced"),
        ({**BUCKET, "num_buckets": 0}, "num_buckets is 0, but 1 are announced"),
        ({**BUCKET, "num_buckets": True}, "num_buckets must be an integer"),
        ({**BUCKET, "num_buckets": "1"}, "num_buckets must be an integer"),
        ({**BUCKET, "transport": "p2p"}, "transport 'p2p' is not supported"),
        ({**BUCKET, "transport": ["nccl"]}, "transport"),
        ({**BUCKET, "load_format": "flattened_bucket_chunked:4"}, "unknown load_format"),
        ({**BUCKET, "shapes": [[1]]}, "2 names, 2 dtypes, 1 shapes"),
        ({"buckets": [BUCKET, {"names": ["c"]}]}, "bucket 2 of 2: dtypes must be a list"),
        ({"buckets": [BUCKET, {**OTHER, "dtypes": ["c"]}]}, "bucket 2 of 2: .*unknown dtype 'c'"),
        ({"buckets": [BUCKET, OTHER, BUCKET]}, "bucket 3 of 3: tensor 'a' is in bucket 1 already"),
        ({"buckets": [{**OTHER, "names": ["a"]}, OTHER, {}]}, "bucket 3 of 3: names must be"),
    ],
)
def test_an_invalid_prepare_is_refused_with_the_reason(body, message):
    with pytest.raises(GroupError, match=message):
        parse_plans(body)


@given(st.lists(SPECS, min_size=1, max_size=4), st.booleans())
def test_buckets_in_one_block_never_overlap(buckets, dense):
    plans = [
        make_plan([(f"{number}.{name}", *rest) for name, *rest in named(pairs)], dense=dense)
        for number, pairs in enumerate(buckets)
    ]
    whole = merge_plans(plans)
    end = 0
    for message in whole.messages:
        assert message.offset >= end
        end = message.offset + message.nbytes
    assert whole.block_bytes == end
    assert [tensor.name for tensor in whole.tensors] == [
        tensor.name for plan in plans for tensor in plan.tensors
    ]


def test_buckets_are_placed_at_the_given_offsets():
    whole = merge_plans(
        [*parse_plans(BUCKET, dense=True), *parse_plans(OTHER, dense=True)], (100, 7)
    )
    assert whole.offsets == (100, 103, 7)
    assert [message.offset for message in whole.messages] == [100, 103, 7]
    assert whole.block_bytes == 111


def test_a_dtype_may_have_the_prefix_torch():
    bare, prefixed = make_plan([("a", "bfloat16", [2]), ("b", "torch.bfloat16", (2,))]).tensors
    assert (bare.dtype, bare.nbytes, bare.shape) == ("bfloat16", 4, (2,))
    assert (prefixed.dtype, prefixed.nbytes, prefixed.shape) == ("bfloat16", 4, (2,))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("", "float32", [1]), "name"),
        ((3, "float32", [1]), "name"),
        (("w", "float31", [1]), "'w': unknown dtype 'float31'"),
        (("w", "torch.nn", [1]), "unknown dtype"),
        (("w", None, [1]), "unknown dtype None"),
        (("w", "float32", None), "shape must be a list"),
        (("w", "float32", "12"), "shape must be a list"),
        (("w", "float32", [float("nan")]), "integer of 0 or more, not nan"),
        (("w", "float32", [2.0]), "integer of 0 or more"),
        (("w", "float32", [True]), "integer of 0 or more"),
        (("w", "float32", ["2"]), "integer of 0 or more"),
        (("w", "float32", [-2]), "integer of 0 or more, not -2"),
        (("w", "float32", [10**18, 10**18]), "larger than any memory"),
        (("w", "float32", [0, 2**62, 2**62]), "larger than any memory"),
        (("w", "float32", [1] * 65), "65 dimensions"),
    ],
)
def test_an_invalid_spec_is_refused_with_the_reason(spec, message):
    with pytest.raises(GroupError, match=message) as refusal:
        make_plan([("fine", "float32", [1]), spec])
    assert not refusal.value.group_dropped


def test_a_name_that_occurs_twice_is_refused():
    with pytest.raises(GroupError, match="'w' is announced twice"):
        make_plan([("w", "float32", [1]), ("w", "float16", [1])])


def test_a_plan_without_tensors_is_refused():
    with pytest.raises(GroupError, match="no tensor is announced"):
        make_plan([])


@pytest.mark.parametrize("load_format", ["", "direct", "flattened_bucket_chunked:4", "FLATTENED"])
def test_an_unknown_load_format_is_refused(load_format):
    with pytest.raises(GroupError, match="unknown load_format"):
        make_plan([("w", "float32", [1])], load_format)


def test_parallel_lists_become_specs():
    specs = parse_specs(["a", "b"], ["float32", "int8"], [[1], []])
    assert specs == [("a", "float32", [1]), ("b", "int8", [])]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((["a"], ["float32", "int8"], [[1]]), "same length: 1 names, 2 dtypes, 1 shapes"),
        ((["a"], ["float32"], []), "same length"),
        ((None, [], []), "names must be a list, not NoneType"),
        ((["a"], "float32", [[1]]), "dtypes must be a list, not str"),
    ],
)
def test_lists_of_different_lengths_or_types_are_refused(lists, message):
    with pytest.raises(GroupError, match=message):
        parse_specs(*lists)


def test_groups_are_importable_without_torch():
    code = "import sys, omni_proxy.process_group.rank_protocol; print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "False"
