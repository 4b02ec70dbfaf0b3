"""Sample rate conversion by linear interpolation: good enough for speech, and cheap.

Invariant: the first sample stays where it is, and no sample leaves the range of the input.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Samples: TypeAlias = NDArray[np.float32]


def resample(samples: Samples, from_rate: float, to_rate: float) -> Samples:
    """Return `samples` [n] at `to_rate` Hz: [round(n * to_rate / from_rate)], float32.

    Raises ValueError for a rate that is not above 0.
    """
    if not (from_rate > 0 and to_rate > 0):
        raise ValueError(f"cannot resample from {from_rate} Hz to {to_rate} Hz: a rate is above 0")
    if from_rate == to_rate or not len(samples):
        return samples
    length = max(1, round(len(samples) * to_rate / from_rate))
    positions = np.arange(length) * (from_rate / to_rate)
    changed: Samples = np.interp(positions, np.arange(len(samples)), samples).astype(np.float32)
    return changed
