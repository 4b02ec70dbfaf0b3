"""The served path that is most like one that is not: what a 404 suggests.

Pure. Invariant: what is asked for is of a bounded length here, so that a flood of unknown paths
costs no more than its requests do.
"""

from __future__ import annotations

import difflib
from typing import Final

from omni_proxy.admin_ops.routes import paths
from omni_proxy.routing.routes import MODEL_PATHS

# As long as a path of ours with a few letters more.
LONGEST: Final = 64
CUTOFF: Final = 0.8  # the share of letters in common
_KNOWN: Final = sorted({*MODEL_PATHS, *paths()})


def near_path(path: str) -> str:
    """The path that was meant; "" if none is near."""
    if len(path) > LONGEST:
        return ""
    close = difflib.get_close_matches(path, _KNOWN, n=1, cutoff=CUTOFF)
    return close[0] if close and close[0] != path else ""
