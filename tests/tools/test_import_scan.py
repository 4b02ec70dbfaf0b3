"""PyInstaller gets what it looks for from the short search, as from its own."""

from pathlib import Path

import pytest

from omni_proxy import server, watchdog
from tools import import_scan
from tools.import_scan import WANTED, iterate_instructions

CODE = """
import a, b.c as d
from e import f, g
def h():
    import i
    global j
    j = lambda: 1
    del j
    return [k for k in range(2)]
class L:
    m = n = 1
    del n
"""


def blocks(steps):
    """The instructions of each code object; none of one that has nothing wanted."""
    found = [[]]
    for step in steps:
        if step is None:
            found.append([])
        else:
            found[-1].append(step)
    return [each if {step.opcode for step in each} & WANTED else [] for each in found]


@pytest.mark.parametrize("module", [server, watchdog, import_scan, CODE])
def test_all_instructions_are_found_where_one_is_wanted(module):
    util = pytest.importorskip("PyInstaller.lib.modulegraph.util")
    text = module if isinstance(module, str) else Path(module.__file__).read_text()
    code = compile(text, "x", "exec")
    assert blocks(iterate_instructions(code)) == blocks(util.iterate_instructions(code))
    assert len(list(iterate_instructions(code))) < len(list(util.iterate_instructions(code)))
