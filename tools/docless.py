"""Compiled modules without the docstrings of modules and functions, for a build in one file.

Invariant: nothing that runs is another: asserts stay, and each line has its number. Docstrings of
classes stay too: where one is missing, `dataclasses` makes one at each start, which takes longer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

_Documented = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def without_docstrings(modules: Iterable[tuple[str, str | None, str]]) -> dict[str, CodeType]:
    """By name, of those rows (name, path, kind) of PyInstaller's that have a source."""
    return {name: docless(Path(path)) for name, path, _ in modules if path and path.endswith(".py")}


def docless(path: Path) -> CodeType:
    """Raises OSError, SyntaxError."""
    tree = ast.parse(path.read_bytes(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body.pop(0)
            if not node.body:
                node.body.append(ast.copy_location(ast.Pass(), text))
    return compile(tree, str(path), "exec", dont_inherit=True)
