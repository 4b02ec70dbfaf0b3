import ast

import pytest

from tests.tree import ROOT, name_of, parsed, sources

# One concern per file is the rule; a file that needs more lines than this most likely has two.
FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 5
FOLDER_FILES = 12  # `__init__.py` not counted; with more, it has two concerns
DOCSTRING_LINES = 11  # eight, and room for a small diagram
BOUND = ("self", "cls")


def functions(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in named if each.arg not in BOUND]


@pytest.mark.parametrize("path", [*sources(), *sources(ROOT / "tools")], ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= FILE_LINES


@pytest.mark.parametrize("path", [*sources(), *sources(ROOT / "tools")], ids=name_of)
def test_a_function_fits_on_a_screen_and_in_a_head(path):
    for function in functions(path):
        lines = function.end_lineno - function.lineno + 1
        assert lines <= FUNCTION_LINES, f"{function.name}: {lines} lines"
        names = parameters(function)
        assert len(names) <= PARAMETERS, f"{function.name}: {names}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_every_module_has_a_docstring(path):
    told = ast.get_docstring(parsed(path))
    assert told
    assert len(told.splitlines()) <= DOCSTRING_LINES


@pytest.mark.parametrize("folder", sorted({path.parent for path in sources()}), ids=name_of)
def test_a_folder_can_be_read_at_a_glance(folder):
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= FOLDER_FILES, modules
