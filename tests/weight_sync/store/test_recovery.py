import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni_proxy.weight_sync.store import filesystem, recovery
from omni_proxy.weight_sync.store.recovery import STORE_LINK, remove_stale_folders
from omni_proxy.weight_sync.store.version_store import VersionStore
from tests.tree import ROOT
from tests.weight_sync.store.drafts import store_version

# A program with a store that has a version in memory; `keeps` brings that to the disk, too.
PROGRAM = """
import pathlib, sys, time
from omni_proxy.weight_sync.store import filesystem
from omni_proxy.weight_sync.store.version_store import VersionStore
from tests.weight_sync.store.drafts import store_version
filesystem.SHARED_MEMORY = pathlib.Path(sys.argv[2])
disk = pathlib.Path(sys.argv[1])
memory = filesystem.SHARED_MEMORY / (filesystem.shared_memory_prefix() + disk.name)
store = VersionStore(disk, memory=memory)
version = store.publish(store_version(store), None, 1)
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
    monkeypatch.setattr(filesystem, "SHARED_MEMORY", folder)
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


def test_memory_of_a_killed_program_is_removed_once_all_is_on_disk(program, tmp_path):
    process, memory = program("one")
    assert (remove_stale_folders(), (memory / "v1").is_dir()) == ([], True)
    killed(process)
    assert (remove_stale_folders(), memory.exists()) == ([memory], False)
    later = VersionStore(tmp_path / "one", memory=memory)
    assert later.current.number == 1
    later.leave()
    assert not memory.exists()


def test_what_only_lies_in_memory_waits_for_its_own_store(program, tmp_path):
    process, memory = program("one", "forgets")
    killed(process)
    assert (remove_stale_folders(), (memory / "v1").is_dir()) == ([], True)
    later = VersionStore(tmp_path / "one", memory=memory)
    assert later.current.number == 1
    later.close()


def test_memory_of_a_deleted_store_is_removed(program, tmp_path):
    process, memory = program("one", "forgets")
    killed(process)
    (tmp_path / "one").rename(tmp_path / "another")
    assert (remove_stale_folders(), memory.exists()) == ([memory], False)


def test_folders_of_others_and_unlabelled_ones_stay(shared, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (shared / f"{filesystem.shared_memory_prefix()}link").symlink_to(elsewhere)
    (shared / f"{filesystem.shared_memory_prefix()}silent" / "v1").mkdir(parents=True)
    (shared / "omni-proxy-other").mkdir()
    assert remove_stale_folders() == []
    assert len(list(shared.iterdir())) == 3


def test_a_folder_that_was_deleted_and_created_again_is_locked(shared, tmp_path):
    used = shared / f"{filesystem.shared_memory_prefix()}used"
    store = VersionStore(tmp_path / "used", memory=used)
    shutil.rmtree(used)
    store.discard(store.begin(0))
    assert (remove_stale_folders(), (used / STORE_LINK).readlink()) == ([], tmp_path / "used")
    store.close()
    assert remove_stale_folders() == [used]


def test_an_empty_folder_is_removed_unless_locked(shared, tmp_path):
    left, used = (
        shared / f"{filesystem.shared_memory_prefix()}{name}" for name in ("left", "used")
    )
    left.mkdir()
    store = VersionStore(tmp_path / "used", memory=used)
    (used / STORE_LINK).unlink()  # all that is in it
    assert remove_stale_folders() == [left]
    assert (left.exists(), used.exists()) == (False, True)
    store.close()
    assert remove_stale_folders() == [used]


def test_a_folder_removed_before_its_lock_is_created_again(shared, tmp_path, monkeypatch):
    real, tried = recovery._create_and_lock, threading.Event()

    def try_once(memory):
        try:
            return real(memory)
        finally:
            tried.set()

    monkeypatch.setattr(recovery, "_create_and_lock", try_once)
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    memory.mkdir()
    sweeping = os.open(memory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(sweeping, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(VersionStore, tmp_path / "one", memory=memory)
        assert tried.wait(30)  # it was not its turn
        memory.rmdir()
        os.close(sweeping)
        store = starting.result(30)
    assert (memory / STORE_LINK).is_symlink()
    assert remove_stale_folders() == []
    assert store_version(store).folder.parent == memory
    store.close()


def test_a_lock_on_a_folder_that_was_swept_meanwhile_counts_for_nothing(
    shared, tmp_path, monkeypatch
):
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    lock, swept = fcntl.flock, []

    def late(descriptor, how):
        if not swept and Path(f"/proc/self/fd/{descriptor}").readlink() == memory:
            swept.append(memory)
            memory.rmdir()
            memory.mkdir()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    store = VersionStore(tmp_path / "one", memory=memory)
    assert swept == [memory]
    assert (remove_stale_folders(), memory.exists()) == ([], True)
    store.close()


def test_a_store_is_free_for_the_next_one_only_when_its_folder_is_gone(
    shared, tmp_path, monkeypatch
):
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    store = VersionStore(tmp_path / "one", memory=memory)
    give_up = recovery.remove_empty

    def give_up_checked(folder):
        with pytest.raises(filesystem.StoreBusy):
            VersionStore(tmp_path / "one", memory=memory)
        give_up(folder)

    monkeypatch.setattr(recovery, "remove_empty", give_up_checked)
    store.leave()
    assert not memory.exists()
    VersionStore(tmp_path / "one", memory=memory).close()


def test_a_store_that_was_left_in_good_order_leaves_nothing(shared, tmp_path):
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    store = VersionStore(tmp_path / "one", memory=memory)
    store.persist(store.publish(store_version(store), None, 1))
    store.leave()
    assert not memory.exists()
