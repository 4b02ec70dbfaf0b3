import errno
import logging
import os
import stat
import subprocess
from pathlib import Path

import pytest

from omni_proxy.config.flags import Startup
from omni_proxy.config.overlay import SavedState, with_added
from omni_proxy.config.parse import ConfigError, parse
from omni_proxy.runtime_config import state_file as keeping
from omni_proxy.runtime_config.state_file import StateFile, load_state, state_path
from tests.fleet.entries import entry

SOME = with_added(SavedState(), entry("a", origin="api"))
OTHER = with_added(SavedState(), entry("b", origin="api"))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "s.toml"


@pytest.mark.parametrize(
    ("named", "state_file"),
    [("off", None), ("auto", "/etc/proxy.state.toml"), ("/var/s.toml", "/var/s.toml")],
)
def test_its_place(named, state_file):
    config = parse(f'server.state_file = "{named}"', "proxy.toml")
    place = state_path(Startup(Path("/etc/proxy.toml"), {}, (), ""), config)
    assert (str(place) if place else None) == state_file


def test_without_a_file_there_is_no_place_beside_it():
    assert state_path(Startup(None, {}, (), ""), parse("", "")) is None


async def test_what_is_state_file_is_found_again(path):
    state_file = StateFile(path, load_state(path))
    await state_file.save(path, SOME)
    assert (load_state(path), state_file.error) == (SOME, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("place", "why"), [("", "Is a directory"), ("n" * 300, "File name too long")]
)
def test_one_that_cannot_be_read_is_refused_with_its_cure(tmp_path, place, why):
    with pytest.raises(
        ConfigError, match=f"(?s)delete it to discard that state.*cannot be read: {why}"
    ):
        load_state(tmp_path / place)


def test_a_fifo_is_refused_and_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be read: Not a regular file"):
        load_state(path)


async def test_what_could_not_be_written_is_tried_again(path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state_file = StateFile(path, SavedState())
    monkeypatch.setattr(keeping, "write_atomically", full)
    await state_file.save(path, SOME)
    assert state_file.error == f"{path}: No space left on device"
    assert "retried" in caplog.text
    monkeypatch.undo()
    await state_file.save(path, SOME)
    assert (state_file.error, load_state(path)) == ("", SOME)


def test_what_killed_writes_left_is_swept_at_the_start_and_nothing_else(path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = [path.with_name(f".{path.name}.{pid}") for pid in (ended.pid, os.getpid())]
    others = [f".{path.name}.{os.getppid()}", f".{path.name}.old", ".other.toml.1", "s.toml.1"]
    state_file = [path.with_name(name) for name in others]
    for each in (*left, *state_file):
        each.write_text("half")
    StateFile(path, SavedState())
    assert sorted(path.parent.iterdir()) == sorted(state_file)


def test_a_folder_that_is_not_there_has_no_leftovers(tmp_path):
    StateFile(tmp_path / "no such folder" / "s.toml", SavedState())
    assert list(tmp_path.iterdir()) == []


async def test_what_the_disk_has_is_not_written_again(path):
    state_file = StateFile(path, SavedState())
    await state_file.save(path, SavedState())
    assert not path.exists()
    await state_file.save(path, SOME)
    path.unlink()
    await state_file.save(path, SOME)
    assert not path.exists()


async def test_a_state_that_moves_writes_nothing_over(path, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    there = tmp_path / "there.toml"
    there.write_text("of somebody else")
    state_file = StateFile(path, SOME)
    await state_file.save(there, SOME)
    assert load_state(there) == SOME
    assert (tmp_path / "there.toml.old").read_text() == "of somebody else"
    assert f"state_file_replaced file={there}" in caplog.text
    await state_file.save(there, OTHER)
    assert (load_state(there), state_file.error) == (OTHER, "")
    assert (tmp_path / "there.toml.old").read_text() == "of somebody else"


async def test_what_another_proxy_wrote_is_not_written_over(path, caplog):
    ours, theirs = StateFile(path, SavedState()), StateFile(path, SavedState())
    await ours.save(path, SOME)
    await theirs.save(path, OTHER)
    assert "state_file_replaced" in caplog.text
    assert (load_state(path), load_state(path.with_name("s.toml.old"))) == (OTHER, SOME)


async def test_an_empty_state_that_moves_leaves_no_file(path, tmp_path):
    state_file = StateFile(path, SavedState())
    await state_file.save(tmp_path / "new" / "s.toml", SavedState())
    assert os.listdir(tmp_path) == []


async def test_turned_off_nothing_is_wrong(path):
    state_file = StateFile(path, SavedState())
    await state_file.save(path / "below" / "a file", SOME)
    await state_file.save(None, OTHER)
    assert state_file.error == ""
