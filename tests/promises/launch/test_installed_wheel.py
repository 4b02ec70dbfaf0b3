"""The wheel, installed by pip in an environment that has nothing else, runs."""

import os
import subprocess
import sys
import venv

import pytest

from tests.example_counts import thorough
from tests.tree import ROOT
from tools.release import copy, try_program

INSTALL_SECS = 300


def run(*command):
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=INSTALL_SECS,
        check=False,
        # Without PYTHONPATH, which would add the packages of this test run.
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    not thorough(),
    reason="tools/build-release --check, which CI runs, does the same with each Python",
)
def test_the_wheel_runs_in_an_empty_environment_and_is_removed_completely(tmp_path):
    copy(tmp_path / "source")
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(sys.executable, *pip, "wheel", "--no-deps", "-w", tmp_path / "dist", tmp_path / "source")
    (wheel,) = (tmp_path / "dist").iterdir()
    venv.create(tmp_path / "env", with_pip=True)
    run(tmp_path / "env/bin/python", *pip, "install", "--no-compile", wheel)
    try_program(tmp_path / "env", ROOT / "config/example.toml")
