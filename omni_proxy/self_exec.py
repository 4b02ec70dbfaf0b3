"""How this program is started again: from its modules, from an archive, or as a single file.

Every process of ours that is not forked begins with these words. Standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import Final

ARCHIVE: Final = ".pyz"


def program_argv() -> list[str]:
    """The words before those of the command."""
    if getattr(sys, "frozen", False):  # a single-file build is its own interpreter
        return [sys.executable]
    if sys.argv[0].endswith(ARCHIVE):  # what it unpacked is on no other interpreter's path
        return [sys.executable, os.path.abspath(sys.argv[0])]
    return [sys.executable, "-m", "omni_proxy"]
