"""A small run of the discovery bench: no request goes to a pod that was removed."""

import subprocess
import sys

from tests.tree import ROOT


def test_pods_are_replaced_under_traffic_without_a_request_to_a_removed_pod():
    options = ["--discovery", "--pods", "40", "--replaced", "20", "--secs", "1", "--clients", "4"]
    result = subprocess.run(
        [sys.executable, "-m", "tools.bench", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "20 workers were stopped" in result.stdout
    assert "and sent 0 requests after that" in result.stdout
    assert "'open': 40" in result.stdout
