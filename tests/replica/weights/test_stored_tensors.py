import base64
import io
import json
import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from omni_proxy.replica.models import tiny
from omni_proxy.replica.weights.live_tensors import LiveTensors, WeightsError
from omni_proxy.replica.weights.stored_tensors import STORED_DTYPES, StoredTensors, stage_serialized
from tests.example_counts import examples

LAST_NORM = "model.norm.weight"

TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(
        st.sampled_from(list(STORED_DTYPES.values())),
        st.lists(st.integers(0, 4), max_size=3),
        st.integers(0, 2**31),
    ),
    max_size=5,
)


def make_tensor(spec) -> torch.Tensor:
    dtype, shape, seed = spec
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return noise.view(dtype).view(shape) if noise.numel() else torch.empty(shape, dtype=dtype)


def open_stored(data: bytes) -> StoredTensors:
    return StoredTensors(io.BytesIO(data), "the file")


def raw(tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.view(-1).view(torch.uint8).tolist()


@given(TENSORS)
@settings(deadline=None)
def test_files_of_the_safetensors_library_are_read(specs):
    tensors = {name: make_tensor(spec) for name, spec in specs.items()}
    stored = open_stored(save(tensors, {"format": "pt"}))
    assert set(stored.names) == set(tensors)
    for name, tensor in tensors.items():
        assert raw(stored.read(name)) == raw(tensor)
        assert stored.form(name).shape == tuple(tensor.shape)


VALID_FILE = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)})


@given(st.integers(0, len(VALID_FILE) - 1), st.integers(0, 255))
@settings(max_examples=examples(300))
def test_a_changed_byte_is_refused_or_read_as_by_the_library(index, byte):
    data = bytearray(VALID_FILE)
    data[index] = byte
    try:
        expected = load(bytes(data))
    except (SafetensorError, KeyError):
        expected = None
    try:
        stored = open_stored(bytes(data))
        tensors = {name: stored.read(name) for name in stored.names}
    except WeightsError:
        return
    if expected is None:
        # Only the library refuses empty keys, and metadata that is not text.
        assert set(tensors) == {"a", "b"}
        return
    assert {name: raw(tensor) for name, tensor in tensors.items()} == {
        name: raw(tensor) for name, tensor in expected.items()
    }


@given(st.integers(0, len(VALID_FILE) - 1))
def test_a_truncated_file_is_refused_at_any_length(length):
    with pytest.raises(WeightsError, match=r"the file is (truncated|a pickle)"):
        open_stored(VALID_FILE[:length])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_and_never_raise_another_error(data):
    with pytest.raises(WeightsError, match=r"^the file "):
        open_stored(data)


def test_a_header_length_that_looks_like_a_pickle_is_read_as_safetensors():
    for padding in range(128):
        data = save({"a": torch.ones(1)}, {"x": "y" * padding})
        assert open_stored(data).names == ["a"]


def header(entries, data=b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"a": {"dtype": "F32", "shape": [2**60, 0], "data_offsets": [0, 0]}}, "within 0 and"),
        ({"a": {"dtype": "F32", "shape": [1] * 17, "data_offsets": [0, 4]}}, "at most 16"),
        ({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, "truncated"),
        ({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}, "Expected `int`"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "from 0 on"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "data_offsets"),
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            },
            "from 4 on, but its offsets are 0",
        ),
        ([1], "Expected `object`"),
    ],
)
def test_an_invalid_header_is_refused_before_memory_is_allocated(entries, reason):
    with pytest.raises(WeightsError, match=reason):
        open_stored(header(entries, b"1234"))


def test_an_infinite_size_is_refused():
    text = b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}'
    with pytest.raises(WeightsError, match="broken safetensors header"):
        open_stored(struct.pack("<Q", len(text)) + text + b"1234")


def test_a_missing_tensor_is_named():
    with pytest.raises(WeightsError, match="the file has no tensor 'c'"):
        open_stored(VALID_FILE).read("c")


def test_a_file_that_is_truncated_after_opening_is_refused():
    file = io.BytesIO(VALID_FILE)
    stored = StoredTensors(file, "the file")
    file.truncate(len(VALID_FILE) - 5)
    with pytest.raises(WeightsError, match="ended in the middle of a"):
        stored.read("a")


# Tensors in a request


def staged(*parts, rank=0, size=1, **fields):
    texts = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in parts]
    payload = {"serialized_named_tensors": texts} | fields
    return stage_serialized(payload, LiveTensors(tiny.build(0)), rank, size)


NEW = save({LAST_NORM: torch.ones(128)})


def test_each_rank_stages_its_own_serialized_tensors():
    assert len(staged(NEW)) == 1
    assert len(staged(NEW, rank=1, size=2)) == 1
    other = save({LAST_NORM: torch.zeros(128), "lm_head.weight": torch.ones(512, 128)})
    assert [len(staged(NEW, other, rank=rank, size=2)) for rank in (0, 1)] == [1, 2]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "a list of one string"),
        ([NEW, NEW], "a list of one string"),
        (["not base64!"], "is not valid base64"),
        (["a"], "is not valid base64"),
        ([None], "is not valid base64"),
        ([""], "is truncated"),
        ([pickle.dumps({"a": 1})], "is a pickle, which is never read"),
        ([b"PK\x03\x04" + b"\0" * 60], "is a pickle, which is never read"),
        ([save({})], "holds no tensor"),
        ([save({"adapter": torch.ones(1)})], "no tensor 'adapter'"),
        ([save({LAST_NORM: torch.ones(127)})], "has the shape"),
    ],
)
def test_other_data_than_safetensors_of_this_model_is_refused(parts, reason):
    with pytest.raises(WeightsError, match=reason):
        staged(*parts)


def test_an_unsupported_load_format_is_refused():
    with pytest.raises(WeightsError, match="'flattened_bucket' is not supported here"):
        staged(NEW, load_format="flattened_bucket")
    assert len(staged(NEW, load_format="safetensors")) == 1
