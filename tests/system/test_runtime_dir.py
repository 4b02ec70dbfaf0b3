import os
import tempfile

import pytest

from omni_proxy.system import runtime_dir
from omni_proxy.system.runtime_dir import PREFIX, YOUNG_SECS, private_runtime_dir


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runtime_dir, "PARENT_BYTES", len(str(tmp_path)))
    return tmp_path


def left(place, name, age=2 * YOUNG_SECS):
    folder = place / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / "front.sock").touch()
    then = folder.stat().st_mtime - age
    os.utime(folder, (then, then))
    return folder


def test_it_is_ours_alone_and_goes_with_us(place):
    with private_runtime_dir() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "front.sock").touch()
    assert list(place.iterdir()) == []


def test_a_socket_fits_in_where_the_usual_place_is_too_deep(place, monkeypatch):
    deep = place / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(runtime_dir, "INSTEAD", ("/nowhere", str(place)))
    with private_runtime_dir() as folder:
        assert folder.parent == place
    monkeypatch.setattr(runtime_dir, "INSTEAD", ())
    with private_runtime_dir() as folder:
        assert folder.parent == deep


def test_what_a_killed_program_left_is_removed(place):
    killed = left(place, "killed")
    with private_runtime_dir():
        assert not killed.exists()


def test_what_is_in_use_or_young_or_anothers_stays(place, monkeypatch):
    young = left(place, "young", age=0)
    elsewhere = place / "other-thing"
    elsewhere.mkdir()
    with private_runtime_dir() as used:
        then = used.stat().st_mtime - 2 * YOUNG_SECS
        os.utime(used, (then, then))
        with private_runtime_dir():
            assert used.is_dir()
    assert young.is_dir()
    assert elsewhere.is_dir()
    anothers = left(place, "anothers")
    monkeypatch.setattr(runtime_dir.os, "getuid", lambda: -1)
    with private_runtime_dir():
        assert anothers.is_dir()


def test_a_link_is_not_followed(place, tmp_path_factory):
    target = tmp_path_factory.mktemp("elsewhere")
    (target / "kept").touch()
    (place / f"{PREFIX}link").symlink_to(target)
    then = target.stat().st_mtime - 2 * YOUNG_SECS
    os.utime(place / f"{PREFIX}link", (then, then), follow_symlinks=False)
    with private_runtime_dir():
        assert (target / "kept").exists()
