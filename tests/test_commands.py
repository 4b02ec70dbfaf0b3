import os
import re
import subprocess

import pytest

from tests.tree import ROOT

SCRIPTS = [
    path
    for folder in ("tools", ".ci")
    for path in sorted((ROOT / folder).iterdir())
    if path.is_file() and path.read_bytes().startswith(b"#!")
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_has_valid_syntax_and_stops_at_the_first_failure(script):
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "set -euo pipefail" in script.read_text()


def test_the_documented_commands_exist_and_are_executable():
    executable = {path.relative_to(ROOT).as_posix() for path in SCRIPTS if os.access(path, os.X_OK)}
    assert executable >= {"tools/run", "tools/test", "tools/check", ".ci/run"}


def test_the_fast_subset_names_files_and_tests_that_exist():
    """`tools/test --fast` ends with an error if a file that it leaves out has moved."""
    script = (ROOT / "tools/test").read_text()
    words = re.search(r"for path in (.*?); do", script, re.DOTALL)[1].replace("\\\n", " ")
    command = ["bash", "-c", f"printf '%s\\n' {words}"]
    expanded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"promises", "weight_sync/store"} <= set(expanded)
    assert [path for path in expanded if not (ROOT / "tests" / path).exists()] == []
    deselected = re.findall(r"--deselect (\S+)::(\w+)", script)
    assert deselected
    for file, name in deselected:
        assert f"def {name}(" in (ROOT / file).read_text()
