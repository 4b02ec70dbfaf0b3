import subprocess
import sys

import msgspec
import pytest

from omni_proxy.config import schema
from tests.tree import ROOT
from tools import configuration_page
from tools.configuration_page import PAGE, SCHEMA, json_schema, main, page


@pytest.fixture
def temporary_page(tmp_path, monkeypatch):
    path = tmp_path / "configuration.md"
    monkeypatch.setattr(configuration_page, "PAGE", path)
    monkeypatch.setattr(configuration_page, "SCHEMA", tmp_path / "schema.json")
    return path


def rows():
    """The rows of the page: dotted key -> (accepted values, default, meaning)."""
    rows_by_key, table = {}, ""
    for line in page().splitlines():
        if line.startswith("## "):
            table = line.strip("# `[]")
        elif line.startswith("| `"):
            key, takes, default, meaning = line.strip("| ").split(" | ")
            rows_by_key[f"{table}.{key.strip('`')}"] = (takes, default, meaning)
    return rows_by_key


def test_the_page_equals_the_schema():
    assert PAGE.read_text() == page(), "run tools/configuration-page"
    assert SCHEMA.read_text() == json_schema(), "run tools/configuration-page"


def test_every_key_has_a_row_and_every_row_a_meaning():
    def keys(struct, path="", *, in_list=False):
        """A list of tables within a list of tables is one key; its row names their keys."""
        for each in msgspec.inspect.type_info(struct).fields:
            name = f"{path}{each.name}"
            inner = getattr(each.type, "item_type", each.type)
            if isinstance(inner, msgspec.inspect.StructType) and not in_list:
                yield from keys(inner.cls, f"{name}.", in_list=inner is not each.type)
            else:
                yield name

    page_rows = rows()
    assert set(page_rows) == set(keys(schema.Config))
    assert [key for key, row in page_rows.items() if not all(row)] == []


@pytest.mark.parametrize(
    ("key", "takes", "default"),
    [
        ("server.port", "a whole number, 0 to 65,535", "`30000`"),
        ("server.max_payload_size", 'bytes, or a string such as "64MiB"', '`"512MiB"`'),
        ("server.half_close", "`abort`, `answer`", '`"abort"`'),
        ("health.interval_secs", "seconds, above 0", "`10`"),
        ("routing.cache_aware.cache_threshold", "a number, 0 to 1", "`0.5`"),
        ("workers.url", "a base URL, or unix:PATH", "required"),
        ("workers.disabled", "true or false", "`false`"),
        ("launch.command", "a list of strings, not empty", "required"),
        ("launch.env", "a table of strings", "`{}`"),
    ],
)
def test_types_ranges_and_defaults_are_shown_as_in_a_configuration(key, takes, default):
    assert rows()[key][:2] == (takes, default)


def test_the_docstring_of_a_key_replaces_a_bare_list_of_choices():
    assert "recovers by good probes" in rows()["health.on_threshold"][2]
    assert "whoever" not in rows()["routing.sticky_sessions"][2]


def test_a_table_begins_with_the_docstring_of_its_struct():
    assert "`[server.timeouts]`\n\nTimeouts of one exchange" in page()
    assert "`[[launch]]`\n\nA group of replicas" in page()
    assert "`[server]`\n\n| key" in page()


def test_main_writes_the_page_and_checks_it(temporary_page, capsys):
    assert main(["--check"]) == 1
    assert "run tools/configuration-page" in capsys.readouterr().err
    assert main([]) == 0
    assert temporary_page.read_text() == page()
    assert main(["--check"]) == 0
    temporary_page.write_text(page() + "\n")
    assert main(["--check"]) == 1


def test_the_command_refuses_unknown_arguments():
    result = subprocess.run(
        [sys.executable, "-m", "tools.configuration_page", "--help"],
        capture_output=True, text=True, timeout=30, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (2, "usage: tools/configuration-page [--check]\n")
