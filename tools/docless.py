"""Compiled modules without the docstrings of modules and functions, for a build in one file.

Invariant: nothing that runs is another: asserts stay, and each line has its number. Docstrings of
classes stay too: where one is missing, `dataclasses` makes one at each start, which takes longer.
A docstring is the first constant of its code, which the code of a function never loads, and that of
a module once.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType

_HAS_DOCSTRING = getattr(inspect, "CO_HAS_DOCSTRING", 0)  # Python 3.13; before, each has its place
_LOADS = frozenset(dis.hasconst)


def docless(code: CodeType) -> CodeType:
    """The same code, and all that is defined in it, without docstrings."""
    constants = [docless(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    if constants and isinstance(constants[0], str) and _only_docstring(code):
        constants[0] = None
    return code.replace(co_consts=tuple(constants))


def _only_docstring(code: CodeType) -> bool:
    """Whether the first constant is the docstring, and nothing else is equal to it."""
    bytecode = code.co_code
    loaded = sum(
        bytecode[at] in _LOADS and not bytecode[at + 1] for at in range(0, len(bytecode), 2)
    )
    if code.co_name == "<module>":
        return loaded == 1 and _stores_docstring(code)
    if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name.startswith("<"):
        return False  # a class, a comprehension, a lambda
    return loaded == 0 and (not _HAS_DOCSTRING or bool(code.co_flags & _HAS_DOCSTRING))


def _stores_docstring(code: CodeType) -> bool:
    loaded = None
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            return step.argval == "__doc__" and loaded == 0
        loaded = step.arg if step.opcode in _LOADS else loaded
    return False
