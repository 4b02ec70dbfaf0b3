"""Which build runs: compiled modules from a folder, or plain Python."""

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

from tests.tree import ROOT

MODULE = "omni_proxy.dataplane.loop.sockets"
SHOW = "from omni_proxy import native; print(native.build(), native.full_version('1'))"


def run(folder, **variables):
    env = {**os.environ, "OMNI_PROXY_NATIVE": str(folder), "OMNI_PROXY_PURE": "", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / f"{MODULE}{EXTENSION_SUFFIXES[0]}").touch()
    return tmp_path


def test_a_folder_of_compiled_modules_is_used(folder):
    assert run(folder) == ("native omni-proxy 1 (native build)", "")


def test_plain_python_runs_where_there_is_none(tmp_path):
    assert run(tmp_path) == ("python omni-proxy 1", "")


def test_a_variable_asks_for_plain_python(folder):
    assert run(folder, OMNI_PROXY_PURE="1") == ("python omni-proxy 1", "")


def test_modules_older_than_their_text_are_not_used(folder):
    (file,) = folder.iterdir()
    os.utime(file, (0, 0))
    shown, errors = run(folder)
    assert shown == "python omni-proxy 1"
    assert f"is older than {MODULE}" in errors
    assert "tools/build-native" in errors
