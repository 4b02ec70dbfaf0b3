import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omni_proxy.weights.store import places
from omni_proxy.weights.store.leftovers import sweep
from omni_proxy.weights.store.versions import VersionStore
from tests.tree import ROOT
from tests.weights.store.drafts import received

# A program with a store that has a version in memory; `keeps` brings that to the disk, too.
PROGRAM = """
import pathlib, sys, time
from omni_proxy.weights.store import places
from omni_proxy.weights.store.versions import VersionStore
from tests.weights.store.drafts import received
places.SHARED_MEMORY = pathlib.Path(sys.argv[2])
disk = pathlib.Path(sys.argv[1])
memory = places.SHARED_MEMORY / (places.memory_prefix() + disk.name)
store = VersionStore(disk, memory=memory)
version = store.publish(received(store), None, 1)
if sys.argv[3] == "keeps":
    store.persist(version)
print(memory, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Stands for the machine's shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def program(tmp_path, shared):
    """One that runs, and its folder in memory; (name, keeps) -> (process, folder)."""
    running = []

    def started(name, keeps="keeps"):
        words = [sys.executable, "-c", PROGRAM, str(tmp_path / name), str(shared), keeps]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        running.append(process)
        return process, Path(process.stdout.readline().strip())

    yield started
    for each in running:
        each.kill()
        each.communicate()


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_what_a_killed_program_left_goes_once_it_is_dead_and_all_of_it_is_on_the_disk(
    program, tmp_path
):
    process, memory = program("one")
    assert (sweep(), (memory / "v1").is_dir()) == ([], True)
    killed(process)
    assert (sweep(), memory.exists()) == ([memory], False)
    later = VersionStore(tmp_path / "one", memory=memory)
    assert later.current.number == 1
    later.leave()
    assert not memory.exists()


def test_what_only_lies_in_memory_waits_for_its_own_store(program, tmp_path):
    process, memory = program("one", "forgets")
    killed(process)
    assert (sweep(), (memory / "v1").is_dir()) == ([], True)
    later = VersionStore(tmp_path / "one", memory=memory)
    assert later.current.number == 1
    later.close()


def test_what_belongs_to_a_store_that_is_gone_goes_whatever_it_is(program, tmp_path):
    process, memory = program("one", "forgets")
    killed(process)
    (tmp_path / "one").rename(tmp_path / "another")
    assert (sweep(), memory.exists()) == ([memory], False)


def test_the_folders_of_others_and_those_that_say_nothing_stay(shared, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (shared / f"{places.memory_prefix()}link").symlink_to(elsewhere)
    (shared / f"{places.memory_prefix()}silent").mkdir()
    (shared / "omni-proxy-other").mkdir()
    assert sweep() == []
    assert len(list(shared.iterdir())) == 3


def test_a_store_that_was_left_in_good_order_leaves_nothing(shared, tmp_path):
    memory = shared / f"{places.memory_prefix()}one"
    store = VersionStore(tmp_path / "one", memory=memory)
    store.persist(store.publish(received(store), None, 1))
    store.leave()
    assert not memory.exists()
