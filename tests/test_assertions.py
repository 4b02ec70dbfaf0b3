"""Every test checks something: it asserts, expects an exception, or calls a helper that does.

Functions are read as text, since to parse all tests takes seconds. A helper is known by its name,
in whatever file it is.
"""

import re

from tests.tree import ROOT, name_of, sources

START = re.compile(r"^( *)(?:async )?def (\w+)\(", re.MULTILINE)
CHECK = re.compile(r"\bassert(_\w+)?\b|\braise\b|\bfail\(|\braises\(|\bwarns\(|\bRaisesGroup\(")
CALL = re.compile(r"(\w+)\(")


def functions(text):
    """Names and bodies of all functions; that of one in another is in both."""
    for found in START.finditer(text):
        indent = len(found[1])
        end = re.compile(rf"^ {{0,{indent}}}(async|def|class|@)", re.MULTILINE).search(
            text, found.end()
        )
        yield found[2], text[found.end() : end.start() if end else len(text)]


def without_a_check(texts):
    """The names of tests, by module, in which nothing can fail but the code that they call."""
    bodies = [(module, *each) for module, text in texts.items() for each in functions(text)]
    checks = {name for _, name, body in bodies if CHECK.search(body)}
    left = [(module, name, set(CALL.findall(body))) for module, name, body in bodies]
    left = [each for each in left if each[1] not in checks]
    while found := {name for _, name, calls in left if calls & checks}:
        checks |= found
        left = [each for each in left if each[1] not in checks]
    return [f"{module}.{name}" for module, name, _ in left if name.startswith("test_")]


def test_every_test_checks_something():
    paths = [path for path in sources(ROOT / "tests") if path.name != "test_assertions.py"]
    assert without_a_check({name_of(path): path.read_text() for path in paths}) == []


def test_a_test_without_a_check_is_found():
    module = """
def expect(it):
    assert it
def twice(it):
    expect(it), expect(it)
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
