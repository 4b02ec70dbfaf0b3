import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from omni_proxy.weight_sync.store import filesystem, recovery
from omni_proxy.weight_sync.store.recovery import STORE_LINK, remove_stale_folders
from omni_proxy.weight_sync.store.version_store import VersionStore
from tests.tree import ROOT
from tests.weight_sync.store.drafts import store_version

# A program with a store that has a version in memory; with "persist", also on the disk.
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
if sys.argv[3] == "persist":
    store.persist(version)
print(memory, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder in place of the machine's shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(filesystem, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def program(tmp_path, shared):
    """Starts a program: (name, mode) -> (process, its folder in shared memory)."""
    running = []

    def start(name, mode="persist"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / name), str(shared), mode]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        running.append(process)
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in running:
        process.kill()
        process.communicate()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_memory_of_a_killed_program_is_removed_if_all_versions_are_on_disk(program, tmp_path):
    process, memory = program("one")
    assert (remove_stale_folders(), (memory / "v1").is_dir()) == ([], True)
    kill(process)
    assert (remove_stale_folders(), memory.exists()) == ([memory], False)
    later = VersionStore(tmp_path / "one", memory=memory)
    assert later.current.number == 1
    later.leave()
    assert not memory.exists()


def test_versions_that_are_only_in_memory_are_kept_for_their_store(program, tmp_path):
    process, memory = program("one", "memory only")
    kill(process)
    assert (remove_stale_folders(), (memory / "v1").is_dir()) == ([], True)
    later = VersionStore(tmp_path / "one", memory=memory)
    assert later.current.number == 1
    later.close()


def test_memory_of_a_deleted_store_is_removed(program, tmp_path):
    process, memory = program("one", "memory only")
    kill(process)
    (tmp_path / "one").rename(tmp_path / "another")
    assert (remove_stale_folders(), memory.exists()) == ([memory], False)


def test_folders_without_a_store_link_or_of_other_programs_are_kept(shared, tmp_path):
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
    unused, used = (
        shared / f"{filesystem.shared_memory_prefix()}{name}" for name in ("unused", "used")
    )
    unused.mkdir()
    store = VersionStore(tmp_path / "used", memory=used)
    (used / STORE_LINK).unlink()  # its only entry
    assert remove_stale_folders() == [unused]
    assert (unused.exists(), used.exists()) == (False, True)
    store.close()
    assert remove_stale_folders() == [used]


def test_a_folder_removed_before_its_lock_is_created_again(shared, tmp_path, monkeypatch):
    create_and_lock, tried = recovery._create_and_lock, threading.Event()

    def record_attempt(memory):
        try:
            return create_and_lock(memory)
        finally:
            tried.set()

    monkeypatch.setattr(recovery, "_create_and_lock", record_attempt)
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    memory.mkdir()
    descriptor = os.open(memory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(VersionStore, tmp_path / "one", memory=memory)
        assert tried.wait(30)  # the folder is locked by the sweep
        memory.rmdir()
        os.close(descriptor)
        store = starting.result(30)
    assert (memory / STORE_LINK).is_symlink()
    assert remove_stale_folders() == []
    assert store_version(store).folder.parent == memory
    store.close()


def test_a_lock_on_a_folder_that_was_swept_in_between_is_taken_again(shared, tmp_path, monkeypatch):
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    flock, swept = fcntl.flock, []

    def flock_after_sweep(descriptor, operation):
        if not swept and Path(f"/proc/self/fd/{descriptor}").readlink() == memory:
            swept.append(memory)
            memory.rmdir()
            memory.mkdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_sweep)
    store = VersionStore(tmp_path / "one", memory=memory)
    assert swept == [memory]
    assert (remove_stale_folders(), memory.exists()) == ([], True)
    store.close()


@pytest.fixture
def locked_by_other(shared, tmp_path, monkeypatch):
    """The folder of an earlier run in shared memory, and the function that ends another program's
    lock on it."""
    monkeypatch.setattr(recovery, "LOCK_SECS", 0.0)
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    memory.mkdir()
    (memory / STORE_LINK).symlink_to(tmp_path / "one")
    descriptor = os.open(memory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        yield memory, stack.close


def test_a_lock_that_another_program_had_for_long_is_taken_for_the_next_version(
    locked_by_other, tmp_path
):
    memory, unlock = locked_by_other
    store = VersionStore(tmp_path / "one", memory=memory)
    unlock()
    draft = store.begin(0)
    assert (draft.in_memory, remove_stale_folders(), draft.folder.exists()) == (True, [], True)
    store.close()


def test_a_version_is_received_onto_the_disk_while_another_program_has_the_lock(
    locked_by_other, tmp_path
):
    memory, unlock = locked_by_other
    store = VersionStore(tmp_path / "one", memory=memory)
    draft = store.begin(0)
    unlock()
    assert remove_stale_folders() == [memory]
    assert draft.folder.exists()
    store.leave()


def test_a_closed_store_takes_no_lock(shared, tmp_path):
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    store = VersionStore(tmp_path / "one", memory=memory)
    version = store_version(store)
    store.close()
    store.publish(version, None, 1)
    VersionStore(tmp_path / "one", memory=memory).close()
    descriptor = os.open(memory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_lock_is_given_back_if_the_link_to_the_store_cannot_be_written(shared, tmp_path):
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    (memory / STORE_LINK).mkdir(parents=True)  # can't be replaced by a link
    with pytest.raises(OSError, match=STORE_LINK):
        VersionStore(tmp_path / "one", memory=memory)
    (memory / STORE_LINK).rmdir()
    VersionStore(tmp_path / "one", memory=memory).close()
    assert remove_stale_folders() == [memory]


def test_a_store_is_busy_until_its_folder_is_removed(shared, tmp_path, monkeypatch):
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    store = VersionStore(tmp_path / "one", memory=memory)
    remove_empty = recovery.remove_empty

    def check_and_remove(folder):
        with pytest.raises(filesystem.StoreBusy):
            VersionStore(tmp_path / "one", memory=memory)
        remove_empty(folder)

    monkeypatch.setattr(recovery, "remove_empty", check_and_remove)
    store.leave()
    assert not memory.exists()
    VersionStore(tmp_path / "one", memory=memory).close()


def test_an_orderly_leave_removes_the_folder_in_memory(shared, tmp_path):
    memory = shared / f"{filesystem.shared_memory_prefix()}one"
    store = VersionStore(tmp_path / "one", memory=memory)
    store.persist(store.publish(store_version(store), None, 1))
    store.leave()
    assert not memory.exists()
