import math
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.replica.models.gguf import GGUFError, GGUFFile
from tests.example_counts import examples
from tests.replica.models.gguf_files import F16, F32, Q4_1, Q8_0, floats, gguf, single

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.number": 7,
    "a.fraction": 0.5,
    "a.truth": True,
    "names": ["one", "zwei", "三"],
    "ranks": [3, 2, 1],
}
# Finite half floats from their bits: `floats(width=16)` generates wider ones and rejects most.
halves = st.builds(
    lambda sign, bits: struct.unpack("<e", struct.pack("<H", sign << 15 | bits))[0],
    st.booleans(),
    st.integers(0, 0x7BFF),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def open_gguf(folder, content: bytes) -> GGUFFile:
    path = folder / "model.gguf"
    path.unlink(missing_ok=True)  # a file that is still mapped must not shrink
    path.write_bytes(content)
    return GGUFFile(path)


def read_values(file, name, shape) -> list[float]:
    out = np.full(shape, np.nan, np.float32)
    file.read(name, out)
    return out.reshape(-1).tolist()


def test_metadata_and_shapes_round_trip(folder):
    rows = floats(range(6))
    file = open_gguf(folder, gguf(METADATA, [("a", (3, 2), F32, rows), ("b", (6,), F32, rows)]))
    assert file.metadata == METADATA
    assert file.tensors["a"].shape == (2, 3)
    assert read_values(file, "a", (2, 3)) == [0, 1, 2, 3, 4, 5]
    assert read_values(file, "b", (6,)) == [0, 1, 2, 3, 4, 5]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=70))
def test_f32_is_read_unchanged(folder, values):
    file = open_gguf(folder, gguf({}, [("x", (len(values),), F32, floats(values))]))
    assert read_values(file, "x", (len(values),)) == values


@given(st.lists(halves, min_size=1, max_size=70))
def test_f16_is_widened_exactly(folder, values):
    packed = struct.pack(f"<{len(values)}e", *values)
    file = open_gguf(folder, gguf({}, [("x", (len(values),), F16, packed)]))
    assert read_values(file, "x", (len(values),)) == values


@given(st.lists(st.tuples(halves, halves, st.binary(min_size=16, max_size=16)), min_size=1))
def test_q4_1_is_scale_times_nibble_plus_low(folder, blocks):
    packed, expected = b"", []
    for scale, low, nibbles in blocks:
        packed += struct.pack("<ee", scale, low) + nibbles
        numbers = [byte % 16 for byte in nibbles] + [byte // 16 for byte in nibbles]
        expected += [single(scale * number + low) for number in numbers]
    file = open_gguf(folder, gguf({}, [("x", (32, len(blocks)), Q4_1, packed)]))
    assert read_values(file, "x", (len(blocks), 32)) == expected


@given(
    st.lists(
        st.tuples(halves, st.lists(st.integers(-128, 127), min_size=32, max_size=32)), min_size=1
    )
)
def test_q8_0_is_scale_times_number(folder, blocks):
    packed, expected = b"", []
    for scale, numbers in blocks:
        packed += struct.pack("<e32b", scale, *numbers)
        expected += [single(scale * number) for number in numbers]
    file = open_gguf(folder, gguf({}, [("x", (32 * len(blocks),), Q8_0, packed)]))
    assert read_values(file, "x", (32 * len(blocks),)) == expected


def test_a_large_tensor_is_read_completely(folder):
    count = (1 << 16) * 2 + 17
    packed = np.arange(count, dtype="<f4").tobytes()
    file = open_gguf(folder, gguf({}, [("x", (count,), F32, packed)]))
    assert read_values(file, "x", (count,)) == list(range(count))


def test_another_alignment_is_respected(folder):
    tensors = [("a", (1,), F32, floats([1])), ("b", (1,), F32, floats([2]))]
    file = open_gguf(folder, gguf({"general.alignment": 4}, tensors, alignment=4))
    assert read_values(file, "b", (1,)) == [2]


def test_a_truncated_file_is_an_error_at_any_length(folder):
    block = struct.pack("<ee", 1, 0) + bytes(16)
    content = gguf(METADATA, [("a", (32,), Q4_1, block), ("b", (2,), F32, floats([1, 2]))])
    open_gguf(folder, content)
    for length in range(len(content)):
        with pytest.raises(GGUFError, match=r"model\.gguf.*(truncated|empty)"):
            open_gguf(folder, content[:length])


@given(st.data())
@settings(max_examples=examples(300))
def test_a_damaged_file_is_a_gguf_error_or_readable(folder, data):
    content = bytearray(gguf(METADATA, [("a", (3, 2), F32, floats(range(6)))]))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(GGUFError):  # any other exception fails the test
        file = open_gguf(folder, bytes(content))
        for name, stored in file.tensors.items():
            assert len(read_values(file, name, stored.shape)) == math.prod(stored.shape)


@given(st.binary(max_size=200))
def test_a_file_of_random_bytes_is_refused(folder, content):
    with pytest.raises(GGUFError):
        open_gguf(folder, content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04" + bytes(60), "not a GGUF file: it begins with b'PK"),
        (struct.pack("<4sIQQ", b"GGUF", 2, 0, 0), "version 2 is not supported"),
        (gguf({}, [("x", (32,), 12, bytes(40))]), "'x' has the type 12; only F32, F16, Q4_1, Q8_0"),
        (gguf({}, [("x", (33,), Q8_0, bytes(68))]), "rows of 33, not a multiple of 32"),
        (gguf({}, [("x", (2, 0), F32, b"")]), "'x' is empty: its dimensions are [2, 0]"),
        (gguf({}, [("x", (1,) * 5, F32, floats([1]))]), "'x' has 5 dimensions, more than 4"),
        (gguf({}, [("x", (1,), F32, floats([1]))] * 2), "'x' is listed twice"),
        (gguf({"general.alignment": 0}), "alignment 0 is not a positive number"),
        (
            struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99),
            "the metadata 'k' has the unknown value type 99",
        ),
        (
            struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1),
            "an array of the unsupported value type 9",
        ),
        (
            struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**62),
            "truncated",
        ),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1s", 1, b"\xff"), "not UTF-8"),
    ],
)
def test_the_error_names_the_file_and_the_reason(folder, content, reason):
    with pytest.raises(GGUFError, match=r"model\.gguf") as caught:
        open_gguf(folder, content)
    assert reason in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(GGUFError, match=r"away\.gguf: cannot be read: No such file"):
        GGUFFile(tmp_path / "away.gguf")


def test_a_tensor_is_only_read_into_its_own_shape(folder):
    file = open_gguf(folder, gguf({}, [("x", (3, 2), F32, floats(range(6)))]))
    with pytest.raises(GGUFError, match=r"'x' has the shape \(2, 3\), not \(3, 2\)"):
        file.read("x", np.empty((3, 2), np.float32))
    with pytest.raises(GGUFError, match="no tensor 'y'"):
        file.read("y", np.empty((3, 2), np.float32))


def test_required_metadata_is_checked_for_its_type(folder):
    file = open_gguf(folder, gguf(METADATA))
    assert file.require("a.number", int) == 7
    for key, expected_type, actual in (
        ("away", int, "missing"),
        ("names", int, "a list"),
        ("a.truth", int, "a bool"),
    ):
        with pytest.raises(GGUFError, match=f"{key!r} is {actual}"):
            file.require(key, expected_type)
