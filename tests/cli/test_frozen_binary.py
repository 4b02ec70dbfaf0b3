import os
import subprocess
import sys

from omni_proxy.cli.frozen_binary import is_frozen_binary, lead_process_group, prepare_frozen_binary
from tests.tree import ROOT

OUTER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
sys.stdin.read()
"""
INNER = """
import os, pathlib, sys, threading
from omni_proxy.cli.frozen_binary import start_cleanup_process
start_cleanup_process(os.getppid(), pathlib.Path(sys.argv[1]))
print(os.getpid(), flush=True)
threading.Event().wait()
"""


def test_the_inner_process_ends_with_the_outer_and_its_folder_is_removed(tmp_path):
    folder = tmp_path / "unpacked"
    (folder / "deep").mkdir(parents=True)
    command = [sys.executable, "-c", OUTER, INNER, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env) as outer:
        assert int(outer.stdout.readline()) != outer.pid
        assert folder.exists()
        outer.kill()
        # Both processes hold the pipe's write end, so this returns when both have ended.
        assert outer.stdout.read() == b""
    assert not folder.exists()


def test_without_an_unpacked_folder_no_process_is_started(monkeypatch):
    before = os.getpgid(0)
    prepare_frozen_binary()
    lead_process_group()
    assert not is_frozen_binary()
    assert os.getpgid(0) == before


def test_a_frozen_build_in_a_folder_is_not_a_frozen_binary(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/opt/omni/omni-proxy")
    monkeypatch.setattr(sys, "_MEIPASS", "/opt/omni/_internal", raising=False)
    assert not is_frozen_binary()
    monkeypatch.setattr(sys, "_MEIPASS", "/tmp/_MEI1", raising=False)
    assert is_frozen_binary()
