import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.replica.models.whisper.whisper_file import (
    WhisperFileError,
    read_variables,
    read_whisper_file,
)
from tests.replica.models.whisper.small_whisper import model_bin

FEW = {
    "encoder/weight": np.arange(6, dtype="<f2").reshape(2, 3),
    "encoder/num_heads": np.int16(6),
    "flag": np.int8(1),
    "wide": np.asarray([1.5], "<f4"),
    "counts": np.asarray([-1, 1 << 20], "<i4"),
}
FILE = model_bin(FEW, aliases=[("decoder/weight", "encoder/weight")])


def read(data: bytes):
    return read_variables(memoryview(data))


def test_every_variable_comes_out_as_it_was_put_in():
    found = read(FILE)
    for name, variable in FEW.items():
        np.testing.assert_array_equal(found[name], variable)
        assert found[name].dtype == np.asarray(variable).dtype
    assert found["decoder/weight"] is found["encoder/weight"]
    assert set(found) == {*FEW, "decoder/weight"}


@given(st.integers(0, len(FILE) - 1))
def test_a_cut_file_is_refused_wherever_it_is_cut(length):
    with pytest.raises(WhisperFileError, match="the model file is cut"):
        read(FILE[:length])


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(place, change):
    damaged = bytearray(FILE)
    damaged[place] ^= change
    try:
        read(bytes(damaged))
    except WhisperFileError:
        return


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (model_bin(FEW, version=5), "version 5, not 6"),
        (model_bin(FEW, spec="TransformerSpec"), "holds a 'TransformerSpec'"),
        (model_bin(FEW, aliases=[("a", "b")]), "names 'b', which it does not hold"),
        (FILE + b"\0", "goes on after its end"),
        (FILE.replace(b"\x04\x0c\0\0\0", b"\x09\x0c\0\0\0"), "an unknown type, 9"),
        (FILE.replace(b"\x02\x02\0\0\0\x03", b"\x02\x02\0\0\0\x04"), "12 bytes for its shape"),
        (FILE.replace(b"flag", b"\xfflag"), "unreadable name"),
    ],
)
def test_a_file_of_another_kind_is_reported_by_what_is_wrong(data, reason):
    assert data != FILE
    with pytest.raises(WhisperFileError, match=reason):
        read(data)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.bin").write_bytes(FILE)
    # U+0085 ends a line for str.splitlines and is a letter of this vocabulary's alphabet's kind.
    (tmp_path / "vocabulary.txt").write_text("Ġa\nb\x85\n<|endoftext|>\n", "utf-8")
    config = {"suppress_ids": [1, 2], "suppress_ids_begin": [0], "lang_ids": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_vocabulary_and_suppressed_ids_come_from_beside_it(folder):
    file = read_whisper_file(folder / "model.bin")
    assert file.vocabulary == ("Ġa", "b\x85", "<|endoftext|>")
    assert (file.suppressed, file.suppressed_first) == ((1, 2), (0,))
    np.testing.assert_array_equal(file.variables["wide"], [1.5])


@pytest.mark.parametrize("name", ["model.bin", "vocabulary.txt", "config.json"])
@pytest.mark.parametrize("content", [None, b"", b"\xff"])
def test_a_lost_or_damaged_file_is_reported_by_the_models_path(folder, name, content):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    if name == "vocabulary.txt" and content == b"":
        assert read_whisper_file(folder / "model.bin").vocabulary == ()
        return
    with pytest.raises(WhisperFileError, match=r"cannot read the model at .*model\.bin|is cut"):
        read_whisper_file(folder / "model.bin")
