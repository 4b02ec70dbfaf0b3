"""The argv that starts this program again: from its modules, an archive, or a frozen binary.

All processes of the program that are not forked are started with it. Must use only the standard
library.
"""

from __future__ import annotations

import os
import sys
from typing import Final

ARCHIVE: Final = ".pyz"


def program_argv() -> list[str]:
    """The first arguments; those of the command follow."""
    if getattr(sys, "frozen", False):  # a frozen binary is its own interpreter
        return [sys.executable]
    if sys.argv[0].endswith(ARCHIVE):  # the modules can be imported only from the archive
        return [sys.executable, os.path.abspath(sys.argv[0])]
    return [sys.executable, "-m", "omni_proxy"]
