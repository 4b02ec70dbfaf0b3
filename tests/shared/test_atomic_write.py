import os
import stat

import pytest

from omni_proxy.shared.atomic_write import replace_file


def test_a_file_is_replaced_with_its_mode(tmp_path):
    path, temporary = tmp_path / "file", tmp_path / "file.new"
    replace_file(path, b"one", temporary, 0o600)
    replace_file(path, b"two", temporary, 0o600)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"two", ["file"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_failed_write_keeps_the_old_content_and_leaves_no_temporary(
    tmp_path, monkeypatch, function
):
    path, temporary = tmp_path / "file", tmp_path / "file.new"
    replace_file(path, b"old", temporary)
    monkeypatch.setattr(os, function, lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError):
        replace_file(path, b"new", temporary)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])


def test_if_only_the_folder_is_not_synced_the_new_content_is_in_place(tmp_path, monkeypatch):
    path, temporary, fsync = tmp_path / "file", tmp_path / "file.new", os.fsync
    replace_file(path, b"old", temporary)

    def fail_for_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError("no")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(OSError, match="no"):
        replace_file(path, b"new", temporary)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"new", ["file"])


def test_a_write_that_is_interrupted_leaves_no_temporary(tmp_path, monkeypatch):
    path, temporary = tmp_path / "file", tmp_path / "file.new"

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"new", temporary)
    assert os.listdir(tmp_path) == []
