"""A class that a .pxd declares has there every field that its .py sets: else the native build fails
where the plain one works."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PXDS = sorted(ROOT.glob("omni_proxy/**/*.pxd"))
CLASS = re.compile(r"^cdef class (\w+)(?:\((\w+)\))?:\n((?:(?:[ #].*)?\n)*)", re.MULTILINE)
FIELDS = re.compile(r"^    cdef (?:public|readonly) \w+ ([^#\n]+)", re.MULTILINE)
DECLARED = {
    found[1]: (
        found[2],
        {name.strip() for names in FIELDS.findall(found[3]) for name in names.split(",")},
        found[3],
    )
    for path in PXDS
    for found in CLASS.finditer(path.read_text())
}


def declared_fields(name):
    base, fields, body = DECLARED[name]
    more, has_dict = declared_fields(base) if base else (set(), False)
    return fields | more, has_dict or "__dict__" in body


def set_fields(node):
    """What methods of the class set of `self`, and annotated fields of a data class."""
    found = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    if node.decorator_list:
        found |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    return found


@pytest.mark.parametrize("path", PXDS, ids=lambda path: path.stem)
def test_a_pxd_declares_every_field_that_the_class_sets(path):
    tree = ast.parse(path.with_suffix(".py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in DECLARED:
            declared, has_dict = declared_fields(node.name)
            assert has_dict or set_fields(node) <= declared, node.name
