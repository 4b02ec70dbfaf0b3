"""Every error code of the program is in docs/http.md."""

import ast
import re

from tests.tree import PACKAGE, ROOT, nodes, sources

HTTP = (ROOT / "docs/http.md").read_text()
# The position of the error code among the arguments of these calls.
CODE_AT = {"HttpError": 2, "bad": 1, "_bad": 1, "AttemptFailed": 0}


def error_codes():
    codes = set()
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                position = CODE_AT.get(node.func.id)
                if position is not None and len(node.args) > position:
                    codes |= names_in(node.args[position])
            elif isinstance(node, ast.FunctionDef) and node.name in CODE_AT:
                codes |= {name for default in node.args.defaults for name in names_in(default)}
    # The reasons why no worker can take a request: the first element of a tuple.
    for node in nodes(PACKAGE / "routing/pick.py"):
        if isinstance(node, ast.Return | ast.Yield) and isinstance(node.value, ast.Tuple):
            codes |= names_in(node.value.elts[0])
    return codes


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
