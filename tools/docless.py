"""Removes the docstrings of modules and functions from compiled modules, for the single-file build.

Invariant: behaviour is unchanged: asserts and line numbers are kept. Docstrings of classes are
kept, too: if one is missing, `dataclasses` generates one at each start, which is slower. A
docstring is the first constant of its code object; the code of a function never loads it, that of a
module loads it once.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType

_HAS_DOCSTRING = getattr(inspect, "CO_HAS_DOCSTRING", 0)  # from Python 3.13 on
_LOADS = frozenset(dis.hasconst)


def docless(code: CodeType) -> CodeType:
    """The code, and all code defined in it, without docstrings."""
    constants = [docless(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    if constants and isinstance(constants[0], str) and _only_docstring(code):
        constants[0] = None
    return code.replace(co_consts=tuple(constants))


def _only_docstring(code: CodeType) -> bool:
    """Whether the first constant is the docstring and is not used as another constant."""
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
