import traceback

import pytest

from tools.docless import docless

SOURCE = '''"""Of the module."""

from __future__ import annotations


class Kept:
    """Of a class."""

    def method(self):
        """Of a function."""
        return "no docstring"


async def bare():
    """All there is."""


def broken():
    """Ahead of what fails."""
    assert not __debug__, "asserts are there"


def text():
    return """no docstring either"""


def shared():
    """One text."""
    return "One text.", [word for word in ("first", "second")], lambda: "third"
'''


@pytest.fixture
def names():
    names = {}
    exec(docless(compile(SOURCE, "it.py", "exec", dont_inherit=True)), names)
    return names


def test_only_docstrings_of_modules_and_functions_are_removed(names):
    assert names.get("__doc__") is None
    assert names["Kept"].__doc__ == "Of a class."
    assert names["Kept"].method.__doc__ is names["bare"].__doc__ is None
    assert names["Kept"]().method() == "no docstring"
    assert names["text"]() == "no docstring either"


def test_a_docstring_that_is_also_a_constant_stays(names):
    text, listed, function = names["shared"]()
    assert (text, listed, function()) == ("One text.", ["first", "second"], "third")


def test_asserts_and_line_numbers_stay(names):
    with pytest.raises(AssertionError, match="asserts are there") as failure:
        names["broken"]()
    last = traceback.extract_tb(failure.value.__traceback__)[-1]
    number = 1 + next(i for i, line in enumerate(SOURCE.splitlines()) if "assert not" in line)
    assert (last.filename, last.lineno) == ("it.py", number)
