import ast

from tests.tree import ROOT, name_of, nodes, parsed, sources

# One concern per file is the rule; a file that needs more lines than this most likely has two.
FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 5
FOLDER_FILES = 12  # `__init__.py` not counted; with more, it has two concerns
DOCSTRING_LINES = 11  # eight, and room for a small diagram
BOUND = ("self", "cls")
OURS = [*sources(), *sources(ROOT / "tools")]


def functions(path):
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in named if each.arg not in BOUND]


def test_a_file_can_be_read_in_one_sitting():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in OURS}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_a_function_fits_on_a_screen_and_in_a_head():
    found = [(name_of(path), function) for path in OURS for function in functions(path)]
    lines = {(name, each.name): each.end_lineno - each.lineno + 1 for name, each in found}
    assert {key: count for key, count in lines.items() if count > FUNCTION_LINES} == {}
    names = {(name, each.name): parameters(each) for name, each in found}
    assert {key: each for key, each in names.items() if len(each) > PARAMETERS} == {}


def test_every_module_has_a_docstring():
    texts = {name_of(path): ast.get_docstring(parsed(path)) for path in sources()}
    assert [name for name, text in texts.items() if not text] == []
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: count for name, count in lines.items() if count > DOCSTRING_LINES} == {}


def test_a_folder_can_be_read_at_a_glance():
    files = {
        name_of(folder): [each.name for each in folder.glob("*.py") if each.name != "__init__.py"]
        for folder in {path.parent for path in OURS}
    }
    assert {name: each for name, each in files.items() if len(each) > FOLDER_FILES} == {}
