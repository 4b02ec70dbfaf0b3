"""The short search finds every instruction that PyInstaller's own search finds."""

from pathlib import Path

import pytest

from omni_proxy import server
from omni_proxy.shared import watchdog
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
    """The instructions of each code object; none if it has no wanted instruction."""
    code_objects = [[]]
    for step in steps:
        if step is None:
            code_objects.append([])
        else:
            code_objects[-1].append(step)
    return [block if {step.opcode for step in block} & WANTED else [] for block in code_objects]


@pytest.mark.parametrize("module", [server, watchdog, import_scan, CODE])
def test_a_code_object_with_a_wanted_instruction_yields_all_its_instructions(module):
    util = pytest.importorskip("PyInstaller.lib.modulegraph.util")
    text = module if isinstance(module, str) else Path(module.__file__).read_text()
    code = compile(text, "x", "exec")
    assert blocks(iterate_instructions(code)) == blocks(util.iterate_instructions(code))
    assert len(list(iterate_instructions(code))) < len(list(util.iterate_instructions(code)))
