"""Runs pytest in a process of its own, on test files that a test has written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tree import ROOT

TIMEOUT_SECS = 120


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in `folder`, without plug-ins but those in `options` (`-p`)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, folder]
    # Importing all installed plug-ins would take most of the time.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECS,
    )
