"""Constants are replaced by their values in the text that is compiled."""

import pytest

from tests.tree import ROOT
from tools.native_build.build import MODULES, source_of
from tools.native_build.constants import sources_of_constants, with_values

DEFINED = """
from select import EPOLLIN
from typing import Final
from other.numbers import FAR as NEAR, UNKNOWN

SIZE: Final = 4 * 1024
NONE: Final = -1
LINE: Final = b"\\r\\n"
FIRST, SECOND = range(2)
CHANGED = 3
TWICE: Final = 1
TWICE: Final = 2
NAMES: Final = ("a",)
lower: Final = 5
"""


def compiled(body, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "numbers.py").write_text("FAR: Final = 1 << 3\nUNKNOWN = FAR\n")
    text = with_values(f"{DEFINED}\ndef function(one):\n    return {body}\n", tmp_path)
    assert text.startswith(DEFINED), "definitions of the module stay unchanged"
    return text.rpartition("return ")[2].strip()


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("one < SIZE", "one < 4096"),
        ("one - NONE", "one - (-1)"),
        ("(LINE, FIRST, SECOND)", "(b'\\r\\n', 0, 1)"),
        ("EPOLLIN | NEAR", "1 | 8"),
        ("SIZE + one.SIZE + SIZE", "4096 + one.SIZE + 4096"),
        ("one(SIZE=SIZE)", "one(SIZE=4096)"),
    ],
)
def test_a_function_gets_the_value_of_a_constant_that_it_reads(body, value, tmp_path):
    assert compiled(body, tmp_path) == value


@pytest.mark.parametrize(
    "body",
    ["CHANGED", "TWICE", "NAMES", "lower", "UNKNOWN", "[SIZE for SIZE in one]", 'f"{SIZE}"'],
)
def test_a_name_that_may_change_is_still_read_at_run_time(body, tmp_path):
    assert compiled(body, tmp_path) == body


def test_a_parameter_with_the_name_of_a_constant_stays(tmp_path):
    text = "SIZE: Final = 4\n\ndef function(SIZE):\n    return SIZE\n"
    assert with_values(text, tmp_path) == text


@pytest.mark.parametrize("name", MODULES)
def test_each_module_still_compiles_with_the_same_number_of_lines(name):
    source = source_of(ROOT, name)
    if source.suffix == ".py":
        text = source.read_text()
        compile(with_values(text, ROOT), name, "exec")
        assert with_values(text, ROOT).count("\n") == text.count("\n")


def test_the_modules_that_define_a_modules_constants_are_known(tmp_path):
    for name, text in {
        "a": "from b import SIZE, far\nfrom c import lower\n",
        "b": "from d import SIZE\nfrom a import OTHER\n",
        "c": "",
        "d": "SIZE: Final = 1\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = sources_of_constants(tmp_path / "a.py", tmp_path)
    assert sorted(path.stem for path in found) == ["a", "b", "d"]
