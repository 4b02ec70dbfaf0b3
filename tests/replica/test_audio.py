import io
import struct
import wave

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from omni_proxy.replica import audio
from omni_proxy.replica.audio import (
    AudioError,
    decode_audio,
    encode_pcm16,
    encode_wav,
    resample,
)

RATES = st.sampled_from([8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000])
SAMPLES = arrays.arrays(
    np.float32,
    st.integers(1, 400),
    elements=st.floats(-1, 1, width=32, allow_subnormal=False),
)
LOUD_SAMPLES = arrays.arrays(np.float32, st.integers(1, 200), elements=st.floats(-2, 2, width=32))
GUID = bytes.fromhex("000000001000800000aa00389b71")


@given(SAMPLES, RATES, RATES)
def test_resampling_keeps_the_duration_and_the_range(samples, from_rate, to_rate):
    changed = resample(samples, from_rate, to_rate)
    assert changed.dtype == np.float32
    assert len(changed) == max(1, round(len(samples) * to_rate / from_rate))
    assert samples.min() <= changed.min()
    assert changed.max() <= samples.max()
    assert changed[0] == samples[0]


@given(SAMPLES, RATES, st.integers(1, 6))
def test_upsampling_by_a_whole_factor_can_be_undone(samples, rate, times):
    upsampled = resample(samples, rate, rate * times)
    np.testing.assert_allclose(resample(upsampled, rate * times, rate), samples, atol=1e-6)


def test_a_straight_line_stays_straight_when_resampled():
    line = np.linspace(0, 1, 101, dtype=np.float32)
    halves = resample(line, 100, 200)
    np.testing.assert_allclose(halves[:200], np.arange(200) / 200, atol=1e-6)


def test_a_slow_tone_keeps_its_frequency():
    seconds = np.arange(24_000) / 24_000
    tone = np.sin(2 * np.pi * 440 * seconds).astype(np.float32)
    spectrum = np.abs(np.fft.rfft(resample(tone, 24_000, 16_000)))
    assert spectrum.argmax() == 440


def test_no_samples_resample_to_no_samples():
    assert len(resample(np.zeros(0, np.float32), 8_000, 16_000)) == 0


@pytest.mark.parametrize("rates", [(0, 16_000), (16_000, 0), (16_000, -1), (float("nan"), 1)])
def test_a_rate_that_is_not_above_0_is_refused(rates):
    with pytest.raises(ValueError, match="a rate is above 0"):
        resample(np.zeros(3, np.float32), *rates)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack("<4sI", name, len(content)) + content + b"\0" * (len(content) % 2)


def riff(*chunks: bytes) -> bytes:
    content = b"WAVE" + b"".join(chunks)
    return struct.pack("<4sI", b"RIFF", len(content)) + content


def fmt(code=1, channels=1, rate=16_000, bits=16, extra=b"", block=None) -> bytes:
    block = channels * bits // 8 if block is None else block
    return chunk(
        b"fmt ", struct.pack("<HHIIHH", code, channels, rate, rate * block, block, bits) + extra
    )


def extensible(code: int) -> bytes:
    return struct.pack("<HHIH", 22, 16, 4, code) + GUID


@given(LOUD_SAMPLES, st.sampled_from([8_000, 16_000, 24_000, 44_100]))
def test_encoded_samples_decode_to_within_one_quantization_step(samples, rate):
    decoded, decoded_rate = decode_audio(encode_wav(samples, rate))
    assert decoded_rate == rate
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, np.clip(samples, -1, 1), atol=2.1 / 32_768)


@given(LOUD_SAMPLES)
def test_the_wave_module_reads_the_same_samples(samples):
    with wave.open(io.BytesIO(encode_wav(samples, 24_000))) as file:
        assert file.getparams()[:4] == (1, 2, 24_000, len(samples))
        assert file.readframes(len(samples)) == encode_pcm16(samples)


@given(LOUD_SAMPLES)
def test_16_bit_samples_are_truncated_toward_zero(samples):
    expected = [int(np.float32(max(-1.0, min(1.0, x))) * np.float32(32_767)) for x in samples]
    assert list(struct.unpack(f"<{len(samples)}h", encode_pcm16(samples))) == expected


def test_the_header_is_the_canonical_one_of_44_bytes():
    file = encode_wav(np.asarray([0.0, 1.0, -1.0], np.float32), 24_000)
    assert file[:44] == riff(fmt(rate=24_000), chunk(b"data", b"\0" * 6))[:44]
    assert file[44:] == struct.pack("<3h", 0, 32_767, -32_767)


def test_nan_is_written_as_silence_and_infinity_is_clipped():
    assert encode_pcm16(np.asarray([np.nan, np.inf, -np.inf], np.float32)) == struct.pack(
        "<3h", 0, 32_767, -32_767
    )


@pytest.mark.parametrize(
    ("bits", "values"),
    [
        (8, [0, 128, 255]),
        (16, [-(1 << 15), 0, (1 << 15) - 1]),
        (24, [-(1 << 23), 0, (1 << 23) - 1]),
        (32, [-(1 << 31), 0, (1 << 31) - 1]),
    ],
)
@pytest.mark.parametrize("is_extensible", [False, True])
def test_every_integer_width_is_read_full_scale(bits, values, is_extensible):
    body = b"".join(value.to_bytes(bits // 8, "little", signed=bits > 8) for value in values)
    head = fmt(0xFFFE, bits=bits, extra=extensible(1)) if is_extensible else fmt(bits=bits)
    decoded, _ = decode_audio(riff(head, chunk(b"data", body)))
    np.testing.assert_allclose(decoded, [-1, 0, 1], atol=1 / 127)


@pytest.mark.parametrize("head", [fmt(3, bits=32), fmt(0xFFFE, bits=32, extra=extensible(3))])
def test_float_samples_are_decoded_unchanged(head):
    body = struct.pack("<3f", -0.5, 0.0, 1.5)
    assert decode_audio(riff(head, chunk(b"data", body)))[0].tolist() == [-0.5, 0.0, 1.5]


@given(st.integers(1, 6), st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=1, max_size=9))
def test_channels_are_mixed_down_to_their_mean(channels, left):
    frames = np.asarray([[value] + [0] * (channels - 1) for value in left], "<i2")
    decoded, rate = decode_audio(riff(fmt(channels=channels), chunk(b"data", frames.tobytes())))
    assert rate == 16_000
    np.testing.assert_allclose(decoded, np.asarray(left) / 32_768 / channels, atol=1e-6)


def test_unknown_chunks_are_skipped_with_their_padding():
    body = struct.pack("<2h", 1, 2)
    file = riff(chunk(b"LIST", b"odd"), fmt(), chunk(b"fact", b"1234"), chunk(b"data", body))
    assert decode_audio(file)[0].tolist() == [1 / 32_768, 2 / 32_768]


@pytest.mark.parametrize("size", [0x7FFFFFFF, 0xFFFFFFFF])
def test_a_streamed_file_with_a_placeholder_size_ends_where_its_data_ends(size):
    file = riff(fmt()) + struct.pack("<4sI", b"data", size) + struct.pack("<3hx", 1, 2, 3)
    assert decode_audio(file)[0].tolist() == [1 / 32_768, 2 / 32_768, 3 / 32_768]


@given(st.data())
def test_a_truncated_file_is_refused_at_any_length(data):
    whole = riff(fmt(channels=2), chunk(b"data", b"\1\0" * 20))
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(AudioError):
        decode_audio(whole[:length])


@given(st.binary(max_size=120), st.booleans())
def test_arbitrary_bytes_are_decoded_or_refused(tail, has_riff_header):
    try:
        samples, rate = decode_audio(b"RIFF\0\0\0\0WAVEfmt " + tail if has_riff_header else tail)
    except AudioError:
        return
    assert len(samples)
    assert audio.MIN_RATE <= rate <= audio.MAX_RATE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the audio is empty"),
        (b"ID3\4rest", "is MP3"),
        (b"\xff\xfb\x90\x64", "is MP3"),
        (b"\xff\xf1\x50\x80", "is AAC"),
        (b"OggS....", "is Ogg"),
        (b"fLaC....", "is FLAC"),
        (b"\0\0\0\x20ftypM4A ", "is MP4/M4A"),
        (b"\x1a\x45\xdf\xa3....", "is WebM"),
        (b"RIFX....WAVE", "is RIFX"),
        (b"hello world!", "is not a WAV file .it begins with b'hell'"),
        (b"RIFF\0\0\0\0AVI LIST", "is not a WAV file"),
    ],
)
def test_the_refusal_of_another_format_names_it(data, reason):
    with pytest.raises(AudioError, match=reason) as refused:
        decode_audio(data)
    assert "WAV files of 8, 16, 24 or 32 bit PCM" in str(refused.value)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (fmt(7, bits=8), "contains mu-law"),
        (fmt(0x55, bits=0), "contains MP3"),
        (fmt(99), "contains codec 99"),
        (fmt(bits=12, block=2), "12 bit PCM"),
        (fmt(3, bits=64), "64 bit float"),
        (fmt(channels=0), "0 channels"),
        (fmt(channels=65), "65 channels"),
        (fmt(rate=1), "1 samples/s"),
        (fmt(block=3), "is inconsistent"),
        (fmt(0xFFFE, extra=b"\0" * 24), "extensible format is unknown"),
        (fmt(0xFFFE), "extensible format is unknown"),
        (chunk(b"fmt ", b"\1\0\1\0"), "has 4 bytes instead of 16"),
        (b"", "no fmt chunk before its samples"),
    ],
)
def test_the_refusal_of_an_unsupported_wav_format_names_it(head, reason):
    with pytest.raises(AudioError, match=reason):
        decode_audio(riff(head, chunk(b"data", b"\0" * 64)))


def test_a_file_without_samples_is_refused():
    with pytest.raises(AudioError, match="has no samples"):
        decode_audio(riff(fmt(), chunk(b"data", b"")))


def test_a_float_sample_that_is_nan_is_refused():
    body = struct.pack("<2f", 0.0, float("nan"))
    with pytest.raises(AudioError, match="not finite"):
        decode_audio(riff(fmt(3, bits=32), chunk(b"data", body)))
