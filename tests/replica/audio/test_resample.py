import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from omni_proxy.replica.audio.resample import resample

RATES = st.sampled_from([8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000])
SAMPLES = arrays.arrays(
    np.float32,
    st.integers(1, 400),
    elements=st.floats(-1, 1, width=32, allow_subnormal=False),
)


@given(SAMPLES, RATES, RATES)
def test_the_duration_stays_and_the_range_is_not_left(samples, from_rate, to_rate):
    changed = resample(samples, from_rate, to_rate)
    assert changed.dtype == np.float32
    assert len(changed) == max(1, round(len(samples) * to_rate / from_rate))
    assert samples.min() <= changed.min()
    assert changed.max() <= samples.max()
    assert changed[0] == samples[0]


@given(SAMPLES, RATES, st.integers(1, 6))
def test_a_whole_number_of_times_the_rate_can_be_undone(samples, rate, times):
    there = resample(samples, rate, rate * times)
    np.testing.assert_allclose(resample(there, rate * times, rate), samples, atol=1e-6)


def test_a_straight_line_stays_straight():
    line = np.linspace(0, 1, 101, dtype=np.float32)
    halves = resample(line, 100, 200)
    np.testing.assert_allclose(halves[:200], np.arange(200) / 200, atol=1e-6)


def test_a_slow_tone_keeps_its_frequency():
    seconds = np.arange(24_000) / 24_000
    tone = np.sin(2 * np.pi * 440 * seconds).astype(np.float32)
    spectrum = np.abs(np.fft.rfft(resample(tone, 24_000, 16_000)))
    assert spectrum.argmax() == 440


def test_nothing_stays_nothing():
    assert len(resample(np.zeros(0, np.float32), 8_000, 16_000)) == 0


@pytest.mark.parametrize("rates", [(0, 16_000), (16_000, 0), (16_000, -1), (float("nan"), 1)])
def test_a_rate_that_is_not_above_0_is_refused(rates):
    with pytest.raises(ValueError, match="a rate is above 0"):
        resample(np.zeros(3, np.float32), *rates)
