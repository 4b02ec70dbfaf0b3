"""Settings of Python's garbage collector, so that it never blocks the event loop for long.

The time of a collection grows with the number of objects that it examines and frees. Invariant:
objects created at the start are never examined again.
"""

from __future__ import annotations

import gc
from typing import Final

# The thresholds of gc.set_threshold: new objects until a collection, and collections of one
# generation until the next older one is examined. A thousand workers that join create a hundred
# thousand objects within seconds.
THRESHOLDS: Final = 2_500, 5, 200


def collect_before_serving() -> None:
    """Collect once, and exempt all objects created so far from later collections. It takes tens of
    milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def exempt_objects() -> None:
    """Exempt the objects of started services, too. It takes no time."""
    gc.freeze()
