"""Log-mel spectra as in Whisper's training: 16 kHz, windows of 400 samples every 160, 80 bands.

Invariant: the result always covers a window of 30 s; shorter audio is padded with silence, because
the decoder repeats itself on short windows (models.md 3).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from omni_proxy.replica.audio.resample import Samples

RATE = 16_000
FFT_SAMPLES, HOP_SAMPLES = 400, 160
BANDS = 80
WINDOW_SECS = 30
WINDOW_SAMPLES = WINDOW_SECS * RATE
FRAMES = WINDOW_SAMPLES // HOP_SAMPLES
FLOOR = 1e-10
RANGE_DECADES = 8.0  # quieter values are raised to this distance from the loudest


def log_mel(samples: Samples) -> NDArray[np.float32]:
    """Return [80, 3000], float32, of at most 30 s of samples at 16 kHz."""
    if len(samples) > WINDOW_SAMPLES:
        raise ValueError(f"{len(samples)} samples are more than a window of {WINDOW_SAMPLES}")
    whole = np.zeros(WINDOW_SAMPLES, np.float32)
    whole[: len(samples)] = samples
    return log_compress(mel_power(whole))


def mel_power(samples: Samples) -> NDArray[np.float32]:
    """Return [80, n // 160]: the power in every band around every 160th of n samples."""
    around = np.pad(samples, FFT_SAMPLES // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(around, FFT_SAMPLES)[::HOP_SAMPLES]
    spectrum = np.fft.rfft(frames[: len(samples) // HOP_SAMPLES] * _hann())
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    in_bands: NDArray[np.float32] = mel_filters() @ power.T
    return in_bands


def log_compress(power: NDArray[np.float32]) -> NDArray[np.float32]:
    """Take the logarithm, clip to 8 decades below the loudest, and centre."""
    decades = np.log10(np.maximum(power, FLOOR))
    decades = np.maximum(decades, decades.max() - RANGE_DECADES)
    centred: NDArray[np.float32] = ((decades + 4.0) / 4.0).astype(np.float32)
    return centred


@cache
def _hann() -> NDArray[np.float32]:
    # Periodic: the one sample more that np.hanning would end with is the first of the next.
    return np.hanning(FFT_SAMPLES + 1)[:-1].astype(np.float32)


@cache
def mel_filters() -> NDArray[np.float32]:
    """Return [80, 201]: triangles of equal area, spaced evenly on Slaney's mel scale."""
    bins = np.linspace(0, RATE / 2, FFT_SAMPLES // 2 + 1)
    corners = _hertz(np.linspace(0, _mel(RATE / 2), BANDS + 2))
    slopes = (bins[None, :] - corners[:, None]) / np.diff(corners, append=np.inf)[:, None]
    rising = slopes[:-2]
    falling = 1 - slopes[1:-1]
    triangles = np.maximum(0, np.minimum(rising, falling))
    area = 2 / (corners[2:] - corners[:-2])
    filters: NDArray[np.float32] = (triangles * area[:, None]).astype(np.float32)
    return filters


# Slaney's scale: linear up to 1 kHz, which is 15 mel, and then 27 mel for every factor of 6.4.
_LINEAR_HERTZ, _LINEAR_MEL = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz * _LINEAR_MEL / _LINEAR_HERTZ
    return float(_LINEAR_MEL + np.log(hertz / _LINEAR_HERTZ) / _LOG_STEP)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mel * _LINEAR_HERTZ / _LINEAR_MEL
    above = _LINEAR_HERTZ * np.exp(_LOG_STEP * np.maximum(mel - _LINEAR_MEL, 0))
    return np.where(mel < _LINEAR_MEL, linear, above)
