"""The argv that starts this program again: from its modules, an archive, or a frozen binary.

Every process of this program that is not forked begins with it. Standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import Final

ARCHIVE: Final = ".pyz"


def program_argv() -> list[str]:
    """The first words of the argv; those of the command follow."""
    if getattr(sys, "frozen", False):  # a frozen binary is its own interpreter
        return [sys.executable]
    if sys.argv[0].endswith(ARCHIVE):  # its unpacked modules are on no other path
        return [sys.executable, os.path.abspath(sys.argv[0])]
    return [sys.executable, "-m", "omni_proxy"]
