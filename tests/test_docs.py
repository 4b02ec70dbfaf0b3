import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from omni_proxy.cli.arguments import check_parser, serve_parser
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import Timeouts
from omni_proxy.replica import command as replica
from omni_proxy.routing import table
from tests.front.house import A, build_house, entry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HTTP = (ROOT / "docs/http.md").read_text()
DESIGN = (ROOT / "docs/design.md").read_text()
PAGES = ("README.md", "CHANGELOG.md", "docs/design.md", "docs/http.md")

# Which argument of these calls is the code of an error.
CODE_AT = {"Refusal": 2, "bad": 1, "_bad": 1, "TryFailed": 0}
PLACES = {"{worker_id}": A, "{request_id}": "abc", "{name}": "anna"}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def filled(path):
    for place, value in PLACES.items():
        path = path.replace(place, value)
    return path


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_path_leads_to_a_file(page):
    text = (ROOT / page).read_text()
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (folder / target).exists(), target
    for path in re.findall(r"\b(?:tools|config|docs|tests)/[a-z]\w*(?:[./]\w+)*", text):
        if path != "config/example.state.toml":  # the running program writes it
            assert (ROOT / path).exists(), path


def test_every_module_of_the_design_exists():
    modules = re.findall(r"`((?:\w+/)*\w+\.py)`", DESIGN)
    assert modules
    for module in modules:
        assert list((ROOT / "omni_proxy").rglob(module)), module


@pytest.mark.parametrize(
    "line", [line for block in blocks(README, "sh") for line in block.splitlines() if line]
)
def test_every_command_of_the_readme_is_one(line):
    match shlex.split(line, comments=True):
        case ["omni-proxy", *words]:
            accepts(words)
        case ["python", "-m", module, *_]:
            assert (ROOT / module.replace(".", "/") / "__main__.py").exists()
        case ["pip", "install", "."]:
            pass
        case [script, *_]:
            assert (ROOT / script).stat().st_mode & 0o100


def test_the_commands_inside_the_text_are_commands():
    for command in re.findall(r"`omni-proxy ([^`]+)`", README):
        accepts(shlex.split(command))


def accepts(words):
    match words:
        case ["check", *rest]:
            check_parser().parse_args(rest)
        case ["replica"]:
            pass
        case ["replica", "fetch", *rest]:
            replica._fetch_parser().parse_args(rest)
        case _:
            serve_parser().parse_args(words)


def test_the_configurations_of_the_readme_load():
    whole = blocks(README, "toml")
    assert len(whole) == 2
    for text in whole:
        parse(text)


def documented_routes():
    return sorted(set(re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/[^`\s?]*)`", HTTP)))


@pytest.mark.parametrize(("method", "path"), documented_routes())
async def test_every_documented_route_is_served(method, path):
    if table.match(method, filled(path)) is None:
        house = build_house(entry(A))
        answer = await house.client().open(filled(path), method=method)
        assert answer.status_code not in (404, 405)


def test_every_route_is_documented():
    served = {
        (method, row.path)
        for row in (*table._ROWS, table._SPEECH_STREAM, table._OUTCOME, table._VOICE)
        for method in row.methods
    }
    for rule in build_house().app.url_map.iter_rules():
        path = re.sub(r"<[^>]+>", "{worker_id}", rule.rule)
        served |= {(method, path) for method in rule.methods - {"HEAD", "OPTIONS"}}
    assert served == set(documented_routes())


def error_codes():
    found = set()
    for path in (ROOT / "omni_proxy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                at = CODE_AT.get(node.func.id)
                if at is not None and len(node.args) > at:
                    found |= names_in(node.args[at])
            elif isinstance(node, ast.FunctionDef) and node.name in CODE_AT:
                found |= {name for default in node.args.defaults for name in names_in(default)}
    # Why nobody can take a request: told there as the first of a tuple.
    for node in ast.walk(ast.parse((ROOT / "omni_proxy/routing/pick.py").read_text())):
        if isinstance(node, ast.Return | ast.Yield) and isinstance(node.value, ast.Tuple):
            found |= names_in(node.value.elts[0])
    return found


def names_in(node):
    strings = {
        inner.value
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    }
    return {text for text in strings if re.fullmatch(r"[a-z][a-z_]+", text)}


def test_every_error_code_is_documented():
    codes = error_codes()
    assert {"none_healthy", "payload_too_large", "invalid_json", "bad_response"} <= codes
    assert {code for code in codes if f"`{code}`" not in HTTP} == set()


def test_every_clock_is_in_the_design():
    assert {key for key in Timeouts.__struct_fields__ if f"`{key}`" not in DESIGN} == set()


def test_every_dependency_has_its_reason_in_the_design():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted}
    first_cells = re.findall(r"^\| ([^|]+) \|", DESIGN, re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"[\w-]+", cell)}
    assert names <= named
