import numpy as np
import pytest

from omni_proxy.replica.models.whisper import whisper_net
from omni_proxy.replica.models.whisper.whisper_net import log_mel, mel_filters, mel_power


def tone(hertz: float, secs: float = 1.0):
    return np.sin(
        2 * np.pi * hertz * np.arange(int(secs * whisper_net.RATE)) / whisper_net.RATE
    ).astype("f4")


def naive_power(samples):
    """The same by definition: a sum for each frame and frequency, triangles bin by bin."""
    reach = whisper_net.FFT_SAMPLES // 2
    around = np.concatenate([samples[reach:0:-1], samples, samples[-2 : -reach - 2 : -1]])
    place = np.arange(whisper_net.FFT_SAMPLES)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * place / whisper_net.FFT_SAMPLES)
    powers = []
    for start in range(
        0,
        len(samples) // whisper_net.HOP_SAMPLES * whisper_net.HOP_SAMPLES,
        whisper_net.HOP_SAMPLES,
    ):
        frame = around[start : start + whisper_net.FFT_SAMPLES] * window
        waves = [
            np.sum(frame * np.exp(-2j * np.pi * k * place / whisper_net.FFT_SAMPLES))
            for k in range(201)
        ]
        powers.append([naive_band(band, np.abs(waves) ** 2) for band in range(whisper_net.BANDS)])
    return np.asarray(powers).T


def naive_hertz(mel_number):
    above = mel_number - 15
    return mel_number * 200 / 3 if above < 0 else 1000 * 6.4 ** (above / 27)


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


def test_the_power_is_that_of_the_definition():
    chance = np.random.default_rng(5)
    samples = tone(700, 0.06) + chance.standard_normal(960).astype("f4") * 0.1
    np.testing.assert_allclose(mel_power(samples), naive_power(samples), rtol=2e-4, atol=1e-7)


def test_every_band_is_one_triangle_and_they_follow_each_other():
    filters = mel_filters()
    assert filters.shape == (80, 201)
    assert (filters >= 0).all()
    assert (np.diff(filters.argmax(axis=1)) >= 0).all()
    assert (filters.max(axis=1) > 0).all()


@pytest.mark.parametrize("hertz", [200, 1000, 3000, 7000])
def test_a_tone_is_loudest_in_the_band_that_holds_it(hertz):
    loudest = mel_power(tone(hertz))[:, 50].argmax()
    held = np.flatnonzero(mel_filters()[loudest]) * whisper_net.RATE / whisper_net.FFT_SAMPLES
    assert held.min() - 40 <= hertz <= held.max() + 40


@pytest.mark.parametrize("secs", [0, 0.5, 30])
def test_the_window_is_always_whole(secs):
    spectrum = log_mel(tone(440, secs))
    assert spectrum.shape == (80, 3000)
    assert spectrum.dtype == np.float32
    assert spectrum.max() - spectrum.min() <= 8 / 4 + 1e-6


def test_what_is_shorter_is_followed_by_silence():
    spectrum = log_mel(tone(440, 1))
    assert (spectrum[:, 110:] == spectrum.min()).all()
    np.testing.assert_array_equal(spectrum, log_mel(np.pad(tone(440, 1), (0, 16_000))))


def test_more_than_a_window_is_refused():
    with pytest.raises(ValueError, match="more than a window"):
        log_mel(np.zeros(whisper_net.WINDOW_SAMPLES + 1, np.float32))
