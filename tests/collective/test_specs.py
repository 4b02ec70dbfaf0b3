import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.collective.specs import (
    ALIGNMENT_BYTES,
    FLATTENED,
    ITEM_BYTES,
    GroupError,
    plan_of,
    specs_of,
)
from tests.tree import ROOT

SHAPES = st.lists(st.integers(0, 9), max_size=4)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), min_size=1, max_size=12)


def named(pairs):
    return [(f"layer.{index}", dtype, shape) for index, (dtype, shape) in enumerate(pairs)]


def size(dtype, shape):
    total = ITEM_BYTES[dtype]
    for each in shape:
        total *= each
    return total


@given(SPECS)
def test_tensors_sent_one_by_one_never_overlap_and_may_be_of_any_dtype(pairs):
    plan = plan_of(named(pairs))
    end = 0
    for tensor, offset, message in zip(plan.tensors, plan.offsets, plan.messages, strict=True):
        assert offset >= end
        assert offset % ALIGNMENT_BYTES == 0
        assert (message.offset, message.nbytes) == (offset, tensor.nbytes)
        end = offset + tensor.nbytes
    assert plan.block_bytes == end
    assert [tensor.nbytes for tensor in plan.tensors] == [size(*pair) for pair in pairs]


@given(SPECS)
def test_a_flattened_bucket_is_end_to_end_or_refused_for_its_alignment(pairs):
    starts, end, fits = [], 0, True
    for dtype, shape in pairs:
        nbytes = size(dtype, shape)
        fits = fits and (nbytes == 0 or end % ITEM_BYTES[dtype] == 0)
        starts.append(end if nbytes else 0)
        end += nbytes
    if not fits:
        with pytest.raises(GroupError, match="of the flattened bucket, which is no place for"):
            plan_of(named(pairs), FLATTENED)
        return
    plan = plan_of(named(pairs), FLATTENED)
    assert list(plan.offsets) == starts
    (message,) = plan.messages
    assert message.nbytes == plan.block_bytes == end


def test_a_dtype_is_known_with_and_without_its_prefix():
    bare, prefixed = plan_of([("a", "bfloat16", [2]), ("b", "torch.bfloat16", (2,))]).tensors
    assert (bare.dtype, bare.nbytes, bare.shape) == ("bfloat16", 4, (2,))
    assert (prefixed.dtype, prefixed.nbytes, prefixed.shape) == ("bfloat16", 4, (2,))


@pytest.mark.parametrize(
    ("spec", "said"),
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
def test_a_wrong_spec_is_refused_by_what_is_wrong_with_it(spec, said):
    with pytest.raises(GroupError, match=said) as refusal:
        plan_of([("fine", "float32", [1]), spec])
    assert not refusal.value.group_dropped


def test_a_name_may_come_once():
    with pytest.raises(GroupError, match="'w' is announced twice"):
        plan_of([("w", "float32", [1]), ("w", "float16", [1])])


def test_nothing_at_all_is_refused():
    with pytest.raises(GroupError, match="no tensor is announced"):
        plan_of([])


@pytest.mark.parametrize("load_format", ["", "direct", "flattened_bucket_chunked:4", "FLATTENED"])
def test_a_form_that_would_be_received_wrongly_is_refused(load_format):
    with pytest.raises(GroupError, match="unknown load_format"):
        plan_of([("w", "float32", [1])], load_format)


def test_parallel_lists_become_specs():
    specs = specs_of(["a", "b"], ["float32", "int8"], [[1], []])
    assert specs == [("a", "float32", [1]), ("b", "int8", [])]


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ((["a"], ["float32", "int8"], [[1]]), "same length: 1 names, 2 dtypes, 1 shapes"),
        ((["a"], ["float32"], []), "same length"),
        ((None, [], []), "names must be a list, not NoneType"),
        ((["a"], "float32", [[1]]), "dtypes must be a list, not str"),
    ],
)
def test_lists_that_do_not_fit_together_are_refused(lists, said):
    with pytest.raises(GroupError, match=said):
        specs_of(*lists)


def test_groups_are_importable_without_torch():
    code = "import sys, omni_proxy.collective.group; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
