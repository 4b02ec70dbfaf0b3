"""Python's collection of garbage, so that it never stops the event loop for long.

A collection takes about a microsecond for each object that it looks at, and as long for each that
it frees. Invariant: nothing that the start made is ever looked at again.
"""

from __future__ import annotations

import gc
from typing import Final

# New objects until a collection, and collections until one also looks at what the last ones left.
# A thousand workers that join make a hundred thousand objects within seconds.
THRESHOLDS: Final = 2_500, 5, 200


def collect_before_serving() -> None:
    """What imports and the start have made so far lives on. It takes tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def keep_what_there_is() -> None:
    """The services that have begun live on, too. It takes no time."""
    gc.freeze()
