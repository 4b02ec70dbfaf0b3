import os
import stat

import pytest

from omni_proxy.system.files import file_signature, remove_stale_temporaries, write_atomically


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.toml"


def test_a_missing_folder_is_created_for_the_owner_alone(tmp_path):
    path = tmp_path / "new" / "folder" / "s.toml"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert (path.read_text(), os.listdir(path.parent)) == ("two", ["s.toml"])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_failed_write_keeps_the_old_content_and_leaves_no_temporary(path, monkeypatch):
    write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError):
        write_atomically(path, "new")
    assert (path.read_text(), os.listdir(path.parent)) == ("old", ["s.toml"])


def test_temporaries_of_killed_writers_are_removed(path):
    stale = path.with_name(f".{path.name}.{os.getpid()}")
    in_use = path.with_name(f".{path.name}.1")
    other = path.with_name(f".{path.name}.text")
    for file in (stale, in_use, other):
        file.touch()
    remove_stale_temporaries(path)
    assert not stale.exists()
    assert in_use.exists()
    assert other.exists()


def test_a_signature_follows_links_and_is_none_without_a_file(tmp_path):
    link = tmp_path / "link"
    assert file_signature(link) is None
    for name in ("a", "b"):
        (tmp_path / name).write_text("same")
    link.symlink_to("a")
    before = file_signature(link)
    link.unlink()
    link.symlink_to("b")
    assert file_signature(link) != before
