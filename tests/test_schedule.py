import re

from tests.schedule import FLEETS, SHARING_FLEETS, SHARING_TREES, TREES, unit_of, units_of
from tests.tree import ROOT, sources


def test_files_that_share_fleets_of_replicas_stay_in_one_process():
    sharing = {
        str(path.relative_to(ROOT))
        for path in sources(ROOT / "tests/promises")
        if "(fleets)" in path.read_text() or "(fleets," in path.read_text()
    }
    assert sharing == SHARING_FLEETS
    assert {unit_of(f"{file}::test_x[a::b]") for file in sharing} == {FLEETS}


def test_files_that_share_syntax_trees_stay_in_one_process():
    sharing = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(
            r"^from tests.tree import .*\b(imports|nodes|parsed)\b", path.read_text(), re.MULTILINE
        )
    }
    assert sharing == SHARING_TREES
    assert {unit_of(f"{file}::test_x") for file in sharing} == {TREES}


def test_any_other_file_is_its_own_unit():
    assert unit_of("tests/wire/test_head.py::test_x[a]") == "tests/wire/test_head.py"


def test_long_units_begin_first():
    first, second, *_ = SHARING_FLEETS
    nodeids = [
        "tests/wire/test_a.py::test_x", "tests/replica/test_b.py::test_x",
        "tests/promises/test_c.py::test_x", f"{first}::test_x", "tests/wire/test_a.py::test_y",
        f"{second}::test_x",
    ]  # fmt: skip
    assert units_of(nodeids) == [[3, 5], [2], [1], [0, 4]]
