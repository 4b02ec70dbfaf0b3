import errno
import logging
import os
import stat
import subprocess
from pathlib import Path

import pytest

from omni_proxy.config.configuration_flags import Startup
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
    ("setting", "expected"),
    [("off", None), ("auto", "/etc/proxy.state.toml"), ("/var/s.toml", "/var/s.toml")],
)
def test_the_path_of_the_state_file(setting, expected):
    config = parse(f'server.state_file = "{setting}"', "proxy.toml")
    path = state_path(Startup(Path("/etc/proxy.toml"), {}, (), ""), config)
    assert (str(path) if path else None) == expected


def test_without_a_configuration_file_there_is_no_state_file():
    assert state_path(Startup(None, {}, (), ""), parse("", "")) is None


async def test_a_saved_state_is_loaded_again(path):
    state_file = StateFile(path, load_state(path))
    await state_file.save(path, SOME)
    assert (load_state(path), state_file.error) == (SOME, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "reason"), [("", "Is a directory"), ("n" * 300, "File name too long")]
)
def test_an_unreadable_state_file_is_refused_with_advice(tmp_path, name, reason):
    with pytest.raises(
        ConfigError, match=f"(?s)delete it to discard that state.*cannot be read: {reason}"
    ):
        load_state(tmp_path / name)


def test_a_fifo_is_refused_without_blocking(path):
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be read: Not a regular file"):
        load_state(path)


async def test_a_failed_write_is_retried(path, monkeypatch, caplog):
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


def test_only_leftovers_of_killed_writes_are_removed_at_the_start(path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    leftovers = [path.with_name(f".{path.name}.{pid}") for pid in (ended.pid, os.getpid())]
    others = [f".{path.name}.{os.getppid()}", f".{path.name}.old", ".other.toml.1", "s.toml.1"]
    kept = [path.with_name(name) for name in others]
    for file in (*leftovers, *kept):
        file.write_text("half")
    StateFile(path, SavedState())
    assert sorted(path.parent.iterdir()) == sorted(kept)


def test_a_missing_folder_has_no_leftovers(tmp_path):
    StateFile(tmp_path / "no such folder" / "s.toml", SavedState())
    assert list(tmp_path.iterdir()) == []


async def test_an_unchanged_state_is_not_written_again(path):
    state_file = StateFile(path, SavedState())
    await state_file.save(path, SavedState())
    assert not path.exists()
    await state_file.save(path, SOME)
    path.unlink()
    await state_file.save(path, SOME)
    assert not path.exists()


async def test_a_state_that_moves_overwrites_no_file(path, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    there = tmp_path / "there.toml"
    there.write_text("of another program")
    state_file = StateFile(path, SOME)
    await state_file.save(there, SOME)
    assert load_state(there) == SOME
    assert (tmp_path / "there.toml.old").read_text() == "of another program"
    assert f"state_file_replaced file={there}" in caplog.text
    await state_file.save(there, OTHER)
    assert (load_state(there), state_file.error) == (OTHER, "")
    assert (tmp_path / "there.toml.old").read_text() == "of another program"


async def test_the_state_of_another_proxy_is_not_overwritten(path, caplog):
    first, second = StateFile(path, SavedState()), StateFile(path, SavedState())
    await first.save(path, SOME)
    await second.save(path, OTHER)
    assert "state_file_replaced" in caplog.text
    assert (load_state(path), load_state(path.with_name("s.toml.old"))) == (OTHER, SOME)


async def test_an_empty_state_that_moves_leaves_no_file(path, tmp_path):
    state_file = StateFile(path, SavedState())
    await state_file.save(tmp_path / "new" / "s.toml", SavedState())
    assert os.listdir(tmp_path) == []


async def test_a_disabled_state_file_has_no_error(path):
    state_file = StateFile(path, SavedState())
    await state_file.save(path / "below" / "a file", SOME)
    await state_file.save(None, OTHER)
    assert state_file.error == ""
