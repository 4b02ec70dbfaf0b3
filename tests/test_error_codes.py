"""The codes of errors in docs/http.md are those that the program answers with."""

import ast
import re

from tests.tree import PACKAGE, ROOT, nodes, sources

HTTP = (ROOT / "docs/http.md").read_text()
# Which argument of these calls is the code of an error.
CODE_AT = {"HttpError": 2, "bad": 1, "_bad": 1, "AttemptFailed": 0}


def error_codes():
    found = set()
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                at = CODE_AT.get(node.func.id)
                if at is not None and len(node.args) > at:
                    found |= names_in(node.args[at])
            elif isinstance(node, ast.FunctionDef) and node.name in CODE_AT:
                found |= {name for default in node.args.defaults for name in names_in(default)}
    # Why nobody can take a request: told there as the first of a tuple.
    for node in nodes(PACKAGE / "routing/pick.py"):
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
