"""The service file, judged by systemd's own tool where it is installed."""

import configparser
import shutil
import subprocess

import pytest

from omni_proxy.config.schema import ServerConfig
from tests.tree import ROOT

UNIT = ROOT / "contrib/systemd/omni-proxy.service"


def test_the_service_outlasts_a_drain():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(UNIT.read_text())
    server = ServerConfig()
    assert (
        int(unit["Service"]["TimeoutStopSec"]) > server.ready_off_secs + server.drain_timeout_secs
    )


def test_systemd_accepts_the_service(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "omni-proxy"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/omni-proxy", str(program)))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert UNIT.name not in done.stderr, done.stderr
