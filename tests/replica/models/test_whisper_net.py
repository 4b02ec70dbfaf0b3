import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_proxy.replica.models import whisper_net
from omni_proxy.replica.models.whisper_net import (
    WhisperFileError,
    log_mel,
    mel_filters,
    mel_power,
    read_variables,
    read_whisper_file,
)
from tests.replica.models.small_whisper import model_bin

VARIABLES = {
    "encoder/weight": np.arange(6, dtype="<f2").reshape(2, 3),
    "encoder/num_heads": np.int16(6),
    "flag": np.int8(1),
    "wide": np.asarray([1.5], "<f4"),
    "counts": np.asarray([-1, 1 << 20], "<i4"),
}
FILE = model_bin(VARIABLES, aliases=[("decoder/weight", "encoder/weight")])


def read(data: bytes):
    return read_variables(memoryview(data))


def test_every_variable_round_trips():
    variables = read(FILE)
    for name, variable in VARIABLES.items():
        np.testing.assert_array_equal(variables[name], variable)
        assert variables[name].dtype == np.asarray(variable).dtype
    assert variables["decoder/weight"] is variables["encoder/weight"]
    assert set(variables) == {*VARIABLES, "decoder/weight"}


@given(st.integers(0, len(FILE) - 1))
def test_a_truncated_file_is_refused_at_any_length(length):
    with pytest.raises(WhisperFileError, match="the model file is truncated"):
        read(FILE[:length])


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
@example(43, 22)  # a dimension of 0 beside huge ones
def test_a_file_with_a_damaged_byte_has_as_many_elements_or_is_refused(place, change):
    damaged = bytearray(FILE)
    damaged[place] ^= change
    try:
        variables = read(bytes(damaged))
    except WhisperFileError:
        return
    sizes = sorted(variable.nbytes for variable in variables.values())
    assert sizes == sorted(variable.nbytes for variable in read(FILE).values())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (model_bin(VARIABLES, version=5), "version 5, not 6"),
        (model_bin(VARIABLES, spec="TransformerSpec"), "contains a 'TransformerSpec'"),
        (model_bin(VARIABLES, aliases=[("a", "b")]), "refers to 'b', which it does not contain"),
        (FILE + b"\0", "continues after its end"),
        (FILE.replace(b"\x04\x0c\0\0\0", b"\x09\x0c\0\0\0"), "an unknown type, 9"),
        (FILE.replace(b"\x02\x02\0\0\0\x03", b"\x02\x02\0\0\0\x04"), "12 bytes for its shape"),
        (FILE.replace(b"flag", b"\xfflag"), "unreadable name"),
    ],
)
def test_an_invalid_file_is_refused_with_its_reason(data, reason):
    assert data != FILE
    with pytest.raises(WhisperFileError, match=reason):
        read(data)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.bin").write_bytes(FILE)
    # U+0085 ends a line for str.splitlines, but may be part of a token in this file.
    (tmp_path / "vocabulary.txt").write_text("Ġa\nb\x85\n<|endoftext|>\n", "utf-8")
    config = {"suppress_ids": [1, 2], "suppress_ids_begin": [0], "lang_ids": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_vocabulary_and_suppressed_ids_are_read_from_the_models_folder(folder):
    file = read_whisper_file(folder / "model.bin")
    assert file.vocabulary == ("Ġa", "b\x85", "<|endoftext|>")
    assert (file.suppressed, file.suppressed_first) == ((1, 2), (0,))
    np.testing.assert_array_equal(file.variables["wide"], [1.5])


@pytest.mark.parametrize("name", ["model.bin", "vocabulary.txt", "config.json"])
@pytest.mark.parametrize("content", [None, b"", b"\xff"])
def test_a_missing_or_damaged_file_is_refused(folder, name, content):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    if name == "vocabulary.txt" and content == b"":
        assert read_whisper_file(folder / "model.bin").vocabulary == ()
        return
    with pytest.raises(WhisperFileError, match=r"cannot read the model at|is truncated"):
        read_whisper_file(folder / "model.bin")


def tone(hertz: float, secs: float = 1.0):
    return np.sin(
        2 * np.pi * hertz * np.arange(int(secs * whisper_net.RATE)) / whisper_net.RATE
    ).astype("f4")


def naive_power(samples):
    """A naive `mel_power`: a sum for each frame and frequency, and triangles bin by bin."""
    half_window = whisper_net.FFT_SAMPLES // 2
    padded = np.concatenate(
        [samples[half_window:0:-1], samples, samples[-2 : -half_window - 2 : -1]]
    )
    positions = np.arange(whisper_net.FFT_SAMPLES)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * positions / whisper_net.FFT_SAMPLES)
    powers = []
    for start in range(
        0,
        len(samples) // whisper_net.HOP_SAMPLES * whisper_net.HOP_SAMPLES,
        whisper_net.HOP_SAMPLES,
    ):
        frame = padded[start : start + whisper_net.FFT_SAMPLES] * window
        waves = [
            np.sum(frame * np.exp(-2j * np.pi * k * positions / whisper_net.FFT_SAMPLES))
            for k in range(201)
        ]
        powers.append([naive_band(band, np.abs(waves) ** 2) for band in range(whisper_net.BANDS)])
    return np.asarray(powers).T


def naive_hertz(mel_number):
    mels_above_1000_hz = mel_number - 15
    return (
        mel_number * 200 / 3 if mels_above_1000_hz < 0 else 1000 * 6.4 ** (mels_above_1000_hz / 27)
    )


def naive_band(band, power):
    top = 15 + 27 * np.log(8) / np.log(6.4)
    low, middle, high = (naive_hertz(top * (band + i) / (whisper_net.BANDS + 1)) for i in range(3))
    total = 0.0
    for k in range(201):
        hertz = k * whisper_net.RATE / whisper_net.FFT_SAMPLES
        if low < hertz <= middle:
            total += power[k] * (hertz - low) / (middle - low) * 2 / (high - low)
        elif middle < hertz < high:
            total += power[k] * (high - hertz) / (high - middle) * 2 / (high - low)
    return total


def test_the_power_matches_a_naive_implementation():
    rng = np.random.default_rng(5)
    samples = tone(700, 0.06) + rng.standard_normal(960).astype("f4") * 0.1
    np.testing.assert_allclose(mel_power(samples), naive_power(samples), rtol=2e-4, atol=1e-7)


def test_every_band_has_a_peak_and_the_peaks_are_in_order():
    filters = mel_filters()
    assert filters.shape == (80, 201)
    assert (filters >= 0).all()
    assert (np.diff(filters.argmax(axis=1)) >= 0).all()
    assert (filters.max(axis=1) > 0).all()


@pytest.mark.parametrize("hertz", [200, 1000, 3000, 7000])
def test_a_tone_is_loudest_in_the_band_that_contains_it(hertz):
    loudest = mel_power(tone(hertz))[:, 50].argmax()
    frequencies = (
        np.flatnonzero(mel_filters()[loudest]) * whisper_net.RATE / whisper_net.FFT_SAMPLES
    )
    assert frequencies.min() - 40 <= hertz <= frequencies.max() + 40


@pytest.mark.parametrize("secs", [0, 0.5, 30])
def test_the_spectrum_always_has_the_length_of_a_window(secs):
    spectrum = log_mel(tone(440, secs))
    assert spectrum.shape == (80, 3000)
    assert spectrum.dtype == np.float32
    assert spectrum.max() - spectrum.min() <= 8 / 4 + 1e-6


def test_short_audio_is_padded_with_silence():
    spectrum = log_mel(tone(440, 1))
    assert (spectrum[:, 110:] == spectrum.min()).all()
    np.testing.assert_array_equal(spectrum, log_mel(np.pad(tone(440, 1), (0, 16_000))))


def test_audio_longer_than_a_window_is_refused():
    with pytest.raises(ValueError, match="more than a window"):
        log_mel(np.zeros(whisper_net.WINDOW_SAMPLES + 1, np.float32))
