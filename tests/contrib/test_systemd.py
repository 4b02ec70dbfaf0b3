"""The service file, also checked by systemd-analyze if it is installed."""

import configparser
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from omni_proxy.config.schema import ServerConfig
from tests.tree import ROOT

UNIT = ROOT / "contrib/systemd/omni-proxy.service"


def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def test_the_stop_timeout_is_longer_than_a_drain():
    server = ServerConfig()
    assert int(service()["TimeoutStopSec"]) > server.ready_off_secs + server.drain_timeout_secs


def test_a_stop_waits_for_the_end_of_a_drain(tmp_path):
    code = (
        "import pathlib, signal, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print(flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "time.sleep(0.3)\n"
        f"pathlib.Path({str(tmp_path / 'drained')!r}).touch()"
    )
    with subprocess.Popen([sys.executable, "-SEc", code], stdout=subprocess.PIPE) as main:
        main.stdout.readline()
        stop = subprocess.Popen(
            shlex.split(service()["ExecStop"]), env={**os.environ, "MAINPID": str(main.pid)}
        )
        main.wait()
        assert stop.wait() == 0
    assert (tmp_path / "drained").exists()


def test_the_runtime_folder_is_visible_outside_the_service():
    assert service()["PrivateTmp"] == "yes"  # so /tmp can't be used for it
    assert service()["RuntimeDirectory"] == "omni-proxy"


def test_systemd_accepts_the_service(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "omni-proxy"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/omni-proxy", str(program)))
    result = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert UNIT.name not in result.stderr, result.stderr
