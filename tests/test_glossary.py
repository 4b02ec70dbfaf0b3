"""One word for each thing: docs/glossary.md says which, and no other is used.

The last column of each table names words that are not used for the thing. They are looked for in
identifiers, file names, log events and pages.
"""

import ast
import re

import pytest

from tests.tree import PACKAGE, ROOT, name_of, parsed, sources

GLOSSARY = (ROOT / "docs/glossary.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# Words that are ordinary ones elsewhere: not wrong in a sentence, only as names of these things.
ONLY_NAMES = {"young", "told", "tells", "said", "wish", "wishes"}
QUOTED = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def rows():
    for line in GLOSSARY.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and not set(cells[0]) <= {"-"}:
            yield cells


def banned():
    return {word.strip() for row in rows() for word in row[3].split(",") if row[0] != "Term"} - {""}


def words_of(identifier):
    """`read_ahead` and `ReadAhead`: read, ahead."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    return {part.lower() for part in parts}


def identifiers(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_the_glossary_can_be_read_by_this_test():
    assert len(list(rows())) > 50
    assert len(banned()) > 25
    assert {"keeper", "leash", "mine"} <= banned()


def test_no_identifier_and_no_file_has_another_word():
    others = banned()
    found = {
        name_of(path): {name for name in {*identifiers(path), path.stem} if words_of(name) & others}
        for path in sources()
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_no_identifier_of_tests_has_the_words_that_it_had_most():
    """`Doorkeeper` is the paper's name of a part of TinyLFU."""
    others = {"told", "said", "door", "doors"}
    assert others <= banned()
    found = {
        name_of(path): {
            name
            for name in {*identifiers(path), path.stem}
            if words_of(name.replace("Doorkeeper", "")) & others
        }
        for path in sources(ROOT / "tests")
        if re.search("told|said|door", path.read_text(), re.IGNORECASE)
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_has_another_word(path):
    text = GLOSSARY if path.name == "glossary.md" else path.read_text()
    if path.name == "glossary.md":
        text = "\n".join(" ".join(row[:2]) for row in rows())
    words = set(re.findall(r"[a-z]+", QUOTED.sub("", text).lower()))
    assert words & (banned() - ONLY_NAMES) == set()


def test_no_public_class_name_is_used_in_two_files():
    files = {}
    for path in sources(PACKAGE):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(name_of(path))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
