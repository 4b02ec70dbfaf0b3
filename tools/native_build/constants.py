"""Replaces names of constants by their values in the sources of the native build.

For Cython, a module's global is an object that is looked up at run time, while a literal number is
a C number. Contract: only names in capitals are replaced, which a module assigns once at its top
level, as `Final` or by unpacking a range, to a value computed from numbers and bytes, and only
where functions read them. Members of enumerations are not replaced. No module of the program is
imported.
"""

import ast
import importlib
import operator
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Value = int | bytes

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.LShift: operator.lshift,
    ast.FloorDiv: operator.floordiv,
}
_OF_PYTHON = frozenset(("select", "socket"))  # modules of Python whose constants are used


class _Unknown(Exception):
    """The value can't be computed here."""


def with_values(text: str, root: Path) -> str:
    """The module `text` with its constants replaced in functions.

    `root` is the folder of the modules that it imports.
    """
    tree = ast.parse(text)
    known = constants_of(tree, root)
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    reads = sorted(_reads(tree, known), key=lambda name: (name.lineno, name.col_offset))
    for name in reversed(reads):
        line = lines[name.lineno - 1]
        value = known[name.id]
        spelled = f"({value!r})" if isinstance(value, int) and value < 0 else repr(value)
        lines[name.lineno - 1] = (
            line[: name.col_offset] + spelled.encode() + line[name.end_col_offset :]
        )
    return b"".join(lines).decode()


def sources_of_constants(path: Path, root: Path) -> set[Path]:
    """The program's modules whose constants this one uses, directly or indirectly."""
    found: set[Path] = set()
    left = [path]
    while left:
        for statement in ast.parse(left.pop().read_text()).body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                source = _source(statement.module, root)
                capitals = any(alias.name.isupper() for alias in statement.names)
                if capitals and source.exists() and source not in found:
                    found.add(source)
                    left.append(source)
    return found


def constants_of(tree: ast.Module, root: Path) -> dict[str, Value]:
    """The constants that the module defines or imports."""
    known: dict[str, Value] = {}
    counts: Counter[str] = Counter()
    for statement in tree.body:
        for name, value in _assigned(statement, known, root):
            counts[name] += 1
            if value is not None and name.isupper():
                known[name] = value
    return {name: value for name, value in known.items() if counts[name] == 1}


def _assigned(
    statement: ast.stmt, known: dict[str, Value], root: Path
) -> Iterator[tuple[str, Value | None]]:
    """The names that the statement assigns, with their values, or None if one is unknown."""
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        wanted = [alias for alias in statement.names if alias.name.isupper()]
        theirs = _imported(statement.module, root) if wanted else {}
        for alias in wanted:
            yield alias.asname or alias.name, theirs.get(alias.name)
        return
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        is_final = "Final" in ast.unparse(statement.annotation)
        yield statement.target.id, _computed(statement.value, known) if is_final else None
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            names = [part.id for part in parts if isinstance(part, ast.Name)]
            yield from zip(names, _unpacked(statement.value, known, len(names)), strict=True)


def _imported(module: str, root: Path) -> dict[str, Value]:
    if module in _OF_PYTHON:
        found = vars(importlib.import_module(module))
        return {name: int(value) for name, value in found.items() if isinstance(value, int)}
    source = _source(module, root)
    if not source.exists():
        return {}
    return constants_of(ast.parse(source.read_text()), root)


def _source(module: str, root: Path) -> Path:
    return root / f"{module.replace('.', '/')}.py"


def _unpacked(
    value: ast.expr | None, known: dict[str, Value], count: int
) -> list[int] | list[None]:
    """The values of an assignment such as `A, B = range(2)`."""
    if (
        count > 1
        and isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "range"
        and len(value.args) == 1
        and _computed(value.args[0], known) == count
    ):
        return list(range(count))
    return [None] * count


def _computed(value: ast.expr | None, known: dict[str, Value]) -> Value | None:
    try:
        return _value(value, known)
    except (_Unknown, TypeError, ValueError, ArithmeticError):
        return None


def _value(value: ast.expr | None, known: dict[str, Value]) -> Value:
    if isinstance(value, ast.Constant) and type(value.value) in (int, bytes):
        return value.value  # type: ignore[return-value]
    if isinstance(value, ast.Name) and value.id in known:
        return known[value.id]
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        number = _value(value.operand, known)
        if isinstance(number, int):
            return -number
    if isinstance(value, ast.BinOp) and type(value.op) in _OPERATIONS:
        left, right = _value(value.left, known), _value(value.right, known)
        if isinstance(left, int) and isinstance(right, int):
            return int(_OPERATIONS[type(value.op)](left, right))
    raise _Unknown


def _reads(tree: ast.Module, known: dict[str, Value]) -> Iterator[ast.Name]:
    """The places where functions read constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.Module):
            for function in filter(_is_function, node.body):
                yield from _reads_of(function, known)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _reads_of(function: ast.stmt, known: dict[str, Value]) -> Iterator[ast.Name]:
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    own = {node.id for node in nodes if isinstance(node, ast.Name) and _binds(node)}
    own |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    # In Python 3.11, nodes inside an f-string have no correct source position.
    formatted = {
        id(inner) for node in nodes if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)
    }
    for node in nodes:
        if not isinstance(node, ast.Name) or _binds(node) or id(node) in formatted:
            continue
        if node.id in known and node.id not in own:
            yield node


def _binds(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)
