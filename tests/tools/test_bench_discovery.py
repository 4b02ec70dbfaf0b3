"""The bench of discovery, small: it runs, and no request goes to a pod that is gone."""

import subprocess
import sys

from tests.tree import ROOT


def test_pods_are_replaced_under_traffic_without_a_request_to_one_that_is_gone():
    words = ["--discovery", "--pods", "40", "--replaced", "20", "--secs", "1", "--clients", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 workers were stopped" in done.stdout
    assert "and sent 0 requests after that" in done.stdout
    assert "'open': 40" in done.stdout
