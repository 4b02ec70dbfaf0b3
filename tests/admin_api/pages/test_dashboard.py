"""The files of the dashboard: their sizes, and that they fit each other."""

import re

from omni_proxy.admin_api.routes.dashboard_routes import (
    SCRIPTS,
    STYLES,
    dashboard_page,
)
from tests.tree import ROOT

PAGE = dashboard_page()
PARTS = ROOT / "omni_proxy" / "admin_api" / "pages" / "dashboard"


def test_each_part_is_in_the_page_once():
    assert {path.name for path in PARTS.iterdir()} == {*SCRIPTS, *STYLES, "page.html"}
    for name in (*SCRIPTS, *STYLES):
        assert PAGE.count((PARTS / name).read_text()) == 1, name


def test_no_part_has_more_than_500_lines():
    for name in (*SCRIPTS, *STYLES):
        assert len((PARTS / name).read_text().splitlines()) <= 500, name


def test_each_script_begins_with_a_comment_that_says_what_it_is():
    for name in SCRIPTS:
        assert (PARTS / name).read_text().startswith("/* "), name


def test_no_two_parts_declare_the_same_name():
    declared = re.compile(r"^(?:async )?(?:function|const|let) +(\w+)", re.MULTILINE)
    names = declared.findall(PAGE)
    assert sorted(set(names)) == sorted(names)


def test_each_id_that_a_script_uses_is_in_the_page():
    ids = set(re.findall(r'<\w[^>]* id="([\w-]+)"', PAGE))
    used = set(re.findall(r"""\$\("([\w-]+)"\)""", PAGE))
    emptied = re.findall(r"empties\(([^)]*)\)", PAGE)
    used |= {name for arguments in emptied for name in re.findall(r'"([\w-]+)"', arguments)}
    assert used - ids == set()


def test_the_page_has_less_than_160_kb():
    assert len(PAGE.encode()) < 160_000
