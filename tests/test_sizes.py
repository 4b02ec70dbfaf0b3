import ast

from tests.tree import ROOT, name_of, nodes, parsed, sources

# The rule is one concern per file and per folder. More lines or files than this are probably two; if they
# are one, the file or folder is listed with the concern.
FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 5
FOLDER_FILES = 12  # without `__init__.py`
ONE_CONCERN: dict[str, str] = {}
DOCSTRING_LINES = 11  # eight lines, and room for a small diagram
BOUND = ("self", "cls")
FILES = [*sources(), *sources(ROOT / "tools")]


def functions(path):
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [parameter.arg for parameter in named if parameter.arg not in BOUND]


def test_a_file_with_many_lines_has_one_concern():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    long = {name for name, count in lines.items() if count > FILE_LINES}
    assert long == {name for name in ONE_CONCERN if name in lines}


def test_the_length_and_parameters_of_functions_are_limited():
    functions_by_file = [
        (name_of(path), function) for path in FILES for function in functions(path)
    ]
    lines = {
        (name, each.name): each.end_lineno - each.lineno + 1 for name, each in functions_by_file
    }
    assert {key: count for key, count in lines.items() if count > FUNCTION_LINES} == {}
    names = {(name, each.name): parameters(each) for name, each in functions_by_file}
    assert {key: each for key, each in names.items() if len(each) > PARAMETERS} == {}


def test_every_module_has_a_docstring_of_limited_length():
    texts = {name_of(path): ast.get_docstring(parsed(path)) for path in sources()}
    assert [name for name, text in texts.items() if not text] == []
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: count for name, count in lines.items() if count > DOCSTRING_LINES} == {}


def test_a_folder_with_many_files_has_one_concern():
    files = {
        name_of(folder): [each.name for each in folder.glob("*.py") if each.name != "__init__.py"]
        for folder in {path.parent for path in FILES}
    }
    large = {name for name, each in files.items() if len(each) > FOLDER_FILES}
    assert large == {name for name in ONE_CONCERN if name in files}
    assert all(ONE_CONCERN.values())
