"""Every test checks something: it asserts, expects an exception, or calls a helper that does.

Functions are read as text, since parsing all tests takes seconds. A helper is identified by its
name alone, in any file.
"""

import re

from tests.tree import ROOT, name_of, sources

START = re.compile(r"^( *)(?:async )?def (\w+)\(", re.MULTILINE)
CHECK = re.compile(r"\bassert(_\w+)?\b|\braise\b|\bfail\(|\braises\(|\bwarns\(|\bRaisesGroup\(")
CALL = re.compile(r"(\w+)\(")


def functions(text):
    """Names and bodies of all functions; the body of a nested function is in both."""
    for match in START.finditer(text):
        indent = len(match[1])
        end = re.compile(rf"^ {{0,{indent}}}(async|def|class|@)", re.MULTILINE).search(
            text, match.end()
        )
        yield match[2], text[match.end() : end.start() if end else len(text)]


def without_a_check(texts):
    """The names of tests without a check, in themselves or in the helpers that they call."""
    bodies = [(module, *function) for module, text in texts.items() for function in functions(text)]
    checks = {name for _, name, body in bodies if CHECK.search(body)}
    remaining = [(module, name, set(CALL.findall(body))) for module, name, body in bodies]
    remaining = [function for function in remaining if function[1] not in checks]
    while found := {name for _, name, calls in remaining if calls & checks}:
        checks |= found
        remaining = [function for function in remaining if function[1] not in checks]
    return [f"{module}.{name}" for module, name, _ in remaining if name.startswith("test_")]


def test_every_test_checks_something():
    paths = [path for path in sources(ROOT / "tests") if path.name != "test_assertions.py"]
    assert without_a_check({name_of(path): path.read_text() for path in paths}) == []


def test_a_test_without_a_check_is_found():
    module = """
def expect(value):
    assert value
def twice(value):
    expect(value), expect(value)
def test_one():
    run()
def test_two():
    twice(run())
async def test_three(
    a, b
):
    await run()
def test_four():
    with pytest.raises(ValueError): run()
class Machine:
    def test_five(self):
        run()
"""
    assert without_a_check({"m": module}) == ["m.test_one", "m.test_three", "m.test_five"]
