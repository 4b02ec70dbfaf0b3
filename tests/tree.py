"""The program's modules as syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "omni_proxy"
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, cached: walking a tree takes as long as parsing it."""
    return tuple(ast.walk(parsed(path)))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path, *, lazy: bool = True) -> tuple[str, ...]:
    """The modules that a file imports at run time; with `lazy`, also in its functions."""
    return tuple(_imports(path, lazy=lazy))


def _imports(path: Path, *, lazy: bool) -> Iterator[str]:
    waiting: list[ast.AST] = [parsed(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Expressions contain no statements.
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS)]
