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
