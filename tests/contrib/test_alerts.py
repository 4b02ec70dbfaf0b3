"""The alert rules, checked by promtool if it is installed (Debian package: prometheus)."""

import shutil
import subprocess

import pytest
import yaml

from tests.tree import ROOT

RULES = ROOT / "contrib/prometheus/alerts.yml"


def test_each_alert_has_a_summary_a_description_and_a_severity():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 6
    for rule in group["rules"]:
        assert {*rule["annotations"]} == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_promtool_accepts_the_rules_and_the_configuration():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt install prometheus")
    result = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
