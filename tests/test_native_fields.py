"""A .pxd declares every field that the .py of its class sets. Else the native build fails where
plain Python works."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PXDS = sorted(ROOT.glob("omni_proxy/**/*.pxd"))
CLASS = re.compile(r"^cdef class (\w+)(?:\((\w+)\))?:\n((?:(?:[ #].*)?\n)*)", re.MULTILINE)
FIELDS = re.compile(r"^    cdef (?:public|readonly) \w+ ([^#\n]+)", re.MULTILINE)
DECLARED = {
    match[1]: (
        match[2],
        {name.strip() for names in FIELDS.findall(match[3]) for name in names.split(",")},
        match[3],
    )
    for path in PXDS
    for match in CLASS.finditer(path.read_text())
}


def declared_fields(name):
    base, fields, body = DECLARED[name]
    inherited, has_dict = declared_fields(base) if base else (set(), False)
    return fields | inherited, has_dict or "__dict__" in body


def set_fields(node):
    """The attributes of `self` that methods set, and annotated fields of a data class."""
    fields = {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }
    if node.decorator_list:
        fields |= {child.target.id for child in node.body if isinstance(child, ast.AnnAssign)}
    return fields


@pytest.mark.parametrize("path", PXDS, ids=lambda path: path.stem)
def test_a_pxd_declares_every_field_that_the_class_sets(path):
    tree = ast.parse(path.with_suffix(".py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in DECLARED:
            declared, has_dict = declared_fields(node.name)
            fields = set_fields(node)
            if path.with_suffix(
                ".pyx"
            ).exists():  # it replaces the .py, and has its own private ones
                fields = {name for name in fields if not name.startswith("_")}
            assert has_dict or fields <= declared, node.name
