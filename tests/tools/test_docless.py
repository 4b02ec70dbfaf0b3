import traceback

import pytest

from tools.docless import docless, without_docstrings

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
'''


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "it.py"
    path.write_text(SOURCE)
    return path


def test_only_docstrings_of_modules_and_functions_go(path):
    names = {}
    exec(docless(path), names)
    assert names.get("__doc__") is None
    assert names["Kept"].__doc__ == "Of a class."
    assert names["Kept"].method.__doc__ is names["bare"].__doc__ is None
    assert names["Kept"]().method() == "no docstring"
    assert names["text"]() == "no docstring either"


def test_asserts_stay_and_every_line_has_its_number(path):
    names = {}
    exec(docless(path), names)
    with pytest.raises(AssertionError, match="asserts are there") as failure:
        names["broken"]()
    last = traceback.extract_tb(failure.value.__traceback__)[-1]
    number = 1 + next(i for i, line in enumerate(SOURCE.splitlines()) if "assert not" in line)
    assert (last.filename, last.lineno) == (str(path), number)


def test_what_has_no_source_is_left_out(path):
    rows = [("it", str(path), "PYMODULE"), ("space", "-", "PYMODULE"), ("gone", None, "PYMODULE")]
    assert list(without_docstrings(rows)) == ["it"]
