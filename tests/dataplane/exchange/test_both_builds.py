"""Plain Python and the compiled modules play the same transcripts: whatever is seen is the same.

Compared are bytes to the client and to the worker, counts, log lines, metrics and the times of a
clock that the test moves. Each build has a process of its own.
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
from tests.dataplane.exchange.test_transcripts import CONFIG, TRANSCRIPTS
from tests.dataplane.transcript import play

print(native.build())
for number, (name, (steps, _, _)) in enumerate(TRANSCRIPTS.items()):
    for short in (False, True):
        folder = pathlib.Path(sys.argv[1], f"{number}-{short}")
        folder.mkdir()
        listeners = worker_sockets(folder)
        with World(listeners, "[server]\\nlog_format = 'json'\\n" + CONFIG, short=short).at_work() as world:
            client = world.connect_client(warm=6)
            play(world, client, *steps)
            result = world.seen(whole=True)
            world.finish()
            raw = [each.came for each in world.clients]
            print(name, short, world.began, world.handed_over, raw, result, world.seen(whole=True))
        for each in listeners.values():
            each.close()
"""


def played(folder, **variables):
    """The build that ran, and a line for each transcript with and without the fast path."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder)
    return *done.stdout.split("\n", 1), done.stderr


def test_both_builds_play_the_same_transcripts(tmp_path):
    compiled = os.environ.get("OMNI_PROXY_NATIVE") or str(ROOT / "build/native")
    if not any(Path(compiled).glob("*.so")):
        pytest.skip(f"NOT COMPARED: no compiled modules in {compiled}: run tools/test-native")
    build, native, errors = played(tmp_path / "w", OMNI_PROXY_PURE="", OMNI_PROXY_NATIVE=compiled)
    if build != "native":
        pytest.skip(f"NOT COMPARED: run tools/test-native: {errors}")
    build, plain, _ = played(tmp_path / "w", OMNI_PROXY_PURE="1")
    assert build == "python"
    assert native.count("\n") > 10
    assert native.splitlines() == plain.splitlines()
