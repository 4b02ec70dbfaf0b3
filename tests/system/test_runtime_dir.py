import os
import tempfile

import pytest

from omni_proxy.system import runtime_dir
from omni_proxy.system.runtime_dir import (
    MIN_STALE_SECS,
    OLD_PREFIX,
    PREFIX,
    private_runtime_dir,
)


@pytest.fixture(autouse=True)
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runtime_dir, "MAX_PARENT_BYTES", len(str(tmp_path)))
    return tmp_path


def make_folder(parent, name, age=2 * MIN_STALE_SECS, prefix=PREFIX):
    folder = parent / f"{prefix}{name}"
    folder.mkdir()
    (folder / "admin.sock").touch()
    then = folder.stat().st_mtime - age
    os.utime(folder, (then, then))
    return folder


def test_the_folder_is_private_and_removed_at_the_end(parent):
    with private_runtime_dir() as folder:
        assert folder.parent == parent
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "admin.sock").touch()
    assert list(parent.iterdir()) == []


def test_a_shorter_parent_is_used_if_the_usual_one_is_too_long(parent, monkeypatch):
    deep = parent / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(runtime_dir, "FALLBACK_PARENTS", ("/nowhere", str(parent)))
    with private_runtime_dir() as folder:
        assert folder.parent == parent
    monkeypatch.setattr(runtime_dir, "FALLBACK_PARENTS", ())
    with private_runtime_dir() as folder:
        assert folder.parent == deep


def test_the_folder_of_a_killed_program_is_removed(parent):
    killed = make_folder(parent, "killed")
    with private_runtime_dir():
        assert not killed.exists()


def test_a_folder_stays_that_is_in_use_recent_unrelated_or_of_another_user(parent, monkeypatch):
    fresh = make_folder(parent, "fresh", age=0)
    unrelated = make_folder(parent, "other-thing", prefix="")
    with private_runtime_dir() as used:
        then = used.stat().st_mtime - 2 * MIN_STALE_SECS
        os.utime(used, (then, then))
        with private_runtime_dir():
            assert used.is_dir()
    assert fresh.is_dir()
    assert unrelated.is_dir()
    foreign = make_folder(parent, "foreign")
    monkeypatch.setattr(runtime_dir.os, "getuid", lambda: -1)
    with private_runtime_dir():
        assert foreign.is_dir()


def test_a_link_is_not_followed(parent, tmp_path_factory):
    target = tmp_path_factory.mktemp("elsewhere")
    (target / "kept").touch()
    (parent / f"{PREFIX}link").symlink_to(target)
    then = target.stat().st_mtime - 2 * MIN_STALE_SECS
    os.utime(parent / f"{PREFIX}link", (then, then), follow_symlinks=False)
    with private_runtime_dir():
        assert (target / "kept").exists()


def test_the_folder_of_the_service_manager_is_preferred(parent, monkeypatch):
    managed = parent / "m"
    managed.mkdir()
    monkeypatch.setattr(runtime_dir, "MAX_PARENT_BYTES", len(str(managed)))
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{managed}:/nowhere")
    with private_runtime_dir() as folder:
        assert folder.parent == managed
    managed.rmdir()
    with private_runtime_dir() as folder:
        assert folder.parent == parent


def test_the_folder_of_an_older_version_is_removed(parent):
    killed = make_folder(parent, "killed", prefix=OLD_PREFIX)
    with private_runtime_dir():
        assert not killed.exists()
