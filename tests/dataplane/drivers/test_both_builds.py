"""Plain Python and the compiled modules have equal results for the same transcripts.

The test compares bytes to clients and workers, counts, log lines, metrics and times of the manual
clock. Each build runs in its own process.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tree import ROOT

SCRIPT = """
import pathlib, sys
from omni_proxy import native
from tests.dataplane.both_drivers import World, worker_sockets
from tests.dataplane.drivers.test_transcripts import CONFIG, TRANSCRIPTS
from tests.dataplane.transcript import play

print(native.build())
for number, (name, (steps, _, _)) in enumerate(TRANSCRIPTS.items()):
    for use_fast_path in (False, True):
        folder = pathlib.Path(sys.argv[1], f"{number}-{use_fast_path}")
        folder.mkdir()
        listeners = worker_sockets(folder)
        config = "[server]\\nlog_format = 'json'\\n" + CONFIG
        with World(listeners, config, use_fast_path=use_fast_path).patched() as world:
            client = world.connect_client(warm=6)
            play(world, client, *steps)
            result = world.snapshot(whole=True)
            world.finish()
            raw = [client.received for client in world.clients]
            end = world.snapshot(whole=True)
            print(name, use_fast_path, world.began, world.handed_over, raw, result, end)
        for listener in listeners.values():
            listener.close()
"""


def play_all(folder, **variables):
    """The build, the lines that the script prints for each transcript and path, and the errors."""
    folder.mkdir()
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    shutil.rmtree(folder)
    return *completed.stdout.split("\n", 1), completed.stderr


def test_both_builds_play_the_same_transcripts(tmp_path):
    compiled = os.environ.get("OMNI_PROXY_NATIVE") or str(ROOT / "build/native")
    if not any(Path(compiled).glob("*.so")):
        pytest.skip(f"NOT COMPARED: no compiled modules in {compiled}: run tools/test-native")
    build, native, errors = play_all(tmp_path / "w", OMNI_PROXY_PURE="", OMNI_PROXY_NATIVE=compiled)
    if build != "native":
        pytest.skip(f"NOT COMPARED: run tools/test-native: {errors}")
    build, plain, _ = play_all(tmp_path / "w", OMNI_PROXY_PURE="1")
    assert build == "python"
    assert native.count("\n") > 10
    assert native.splitlines() == plain.splitlines()
